"""How models that write are measured: what they are asked, by whom, and who answers beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from PIL import Image

from mmspec import zoo
from mmspec.api import Accelerated, accelerate
from mmspec.bench import checks, constant
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.environment import dtype_name
from mmspec.bench.progress import Progress
from mmspec.bench.workload import Scored, agreement, facts_right, grouped, repeated
from mmspec.drafters.plain import Silent
from mmspec.modalities.vlm import toys
from mmspec.modalities.vlm.baselines import Generate, SpeculativeGenerate, stock
from mmspec.modality import Answer, Contestant, Quality, Selection, Workload
from mmspec.recipe import Recipe
from mmspec.zoo import language

OWN = "generate"
REPLAYED = 8  # requests whose forwards are made again alone
LOOK = "Describe the picture in detail."
QUESTIONS = (
    "Write a short story about a lighthouse keeper and her dog.",
    "Explain how a bicycle stays upright.",
    "List the steps to repot a plant, one per line, and repeat them at the end.",
    "Translate into French: the weather was fine, so we walked to the harbour.",
)
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")


def workload(model: Any, asker: Any, settings: Any, selection: Selection) -> Workload:
    """Held-out scenes for models of the zoo, judged by facts; else what the user asks."""
    batch = selection.batch
    is_zoo = asker.source.startswith("zoo:") and asker.sees
    is_asked = settings.image is not None or settings.video is not None
    if is_zoo and selection.prompts is None and not is_asked:
        examples = language.examples(selection.count, "held-out", selection.seed, settings.kind)
        groups = grouped(examples, batch)
        asked = [_shown(asker, group) for group in groups]
        shown = [example for group in groups for example in group]
        quality = facts_right(partial(_facts, asker.processor, shown))
        return of_requests(model, asked, quality, batch, selection.drafter)
    bundled = Image.open(zoo.bundled_scene()).convert("RGB")
    images = [bundled] * batch if asker.sees and not is_asked else None
    texts = repeated(selection.prompts or ([LOOK] if asker.sees else QUESTIONS), batch)
    asked = [asker.request(group, images=images) for group in texts]
    return of_requests(model, asked, None, batch, selection.drafter)


def of_requests(
    model: Any,
    requests: Sequence[Mapping[str, Any]],
    quality: Quality | None = None,
    batch: int = 1,
    drafter: Any = None,
) -> Workload:
    """Requests are arguments of `generate`; without a quality, tokens are held against its own."""

    def peers(
        recipes: Mapping[str, Contestant], seed: int, progress: Progress
    ) -> tuple[Mapping[str, Contestant], Mapping[str, str]]:
        return stock(model, drafter, requests, batch, seed, progress)

    said = {name: value for name, value in requests[0].items() if _is_setting(value)}
    return Workload(
        timed=requests,
        plain=SpeculativeGenerate(accelerate(model, "plain")),
        fast=SpeculativeGenerate,
        baselines={OWN: Generate(model)},
        peers=peers,
        controls=partial(constant.controls, model),
        qualities=(quality or agreement(OWN),),
        batch=batch,
        is_greedy=not (said.get("do_sample") or said.get("temperature")),
        replayed=REPLAYED,
        device=model.device,
        settings=said,
        environment={"dtype": dtype_name(model.dtype)},
    )


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Tiny models are counted; equality is asked of the user's own where there is one.

    Raises ValueError for a recipe that needs picture tokens.
    """
    if "codebook" in recipe.options and trial.fast is None:
        raise ValueError("it needs a codebook, which models that write have none of")
    try:
        toy = toys.bound(recipe, 0)
    except ValueError as error:
        toy, why = None, str(error)
    fast = trial.fast or toy
    if fast is None:
        untried = Check("frequencies", "skipped", f"does not run on a tiny model: {why}")
        return recipe, iter([checks.enumeration(recipe, recipe.verifier), untried])
    return fast.recipe, _checks(fast, recipe, trial)


def _checks(fast: Accelerated, recipe: Recipe, trial: Trial) -> Iterator[Check]:
    plan, requests = fast.recipe, trial.requests or [toys.asked()]
    yield checks.enumeration(plan, plan.verifier)
    yield checks.frequency(
        plan, lambda seed: toys.writing(toys.bound(recipe, seed)), trial, "tokens"
    )
    mine = SpeculativeGenerate(fast)
    bare = [{n: v for n, v in one.items() if n not in SAMPLING} for one in requests]
    greedy = [{**one, "do_sample": False} for one in bare]
    yield checks.greedy_equality(plan, Generate(fast.model), mine, greedy, trial, "generate()")
    is_plain = isinstance(fast.session.bound.drafter, Silent)
    plain = None if is_plain else SpeculativeGenerate(accelerate(fast.model, "plain"))
    sampled = [{**one, "do_sample": True, "temperature": 1.0} for one in bare]
    yield checks.seeded_equality(plan, plain, mine, sampled, trial)


def _shown(asker: Any, examples: Sequence[language.Example]) -> dict[str, Any]:
    prompts, images = [one.prompt for one in examples], [one.image for one in examples]
    asked: dict[str, Any] = asker.request(prompts, images=images)
    return asked


def _facts(
    processor: Any, examples: Sequence[language.Example], answers: Sequence[Answer]
) -> Scored:
    rows = [row for answer in answers for row in answer.values]
    texts = [processor.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    pairs = zip(examples, texts, strict=True)
    return [language.score(example, text) for example, text in pairs]


def _is_setting(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)
