"""How models of picture tokens are measured: what they draw, who judges it, and who draws too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mmspec import recipes
from mmspec.api import Accelerated, accelerate
from mmspec.bench import checks, constant
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.environment import placed
from mmspec.bench.workload import repeated
from mmspec.codes.image_family import pictures
from mmspec.drafters.plain import Silent
from mmspec.modalities.common import scenes
from mmspec.modalities.image import toys
from mmspec.modalities.image.drawing import Drawing, Images
from mmspec.modalities.image.ink import ink_per_round
from mmspec.modalities.image.likelihood import log_likelihood
from mmspec.modality import Quality, Runner, RunResult, RunResults, Selection, Speculative, Workload
from mmspec.recipe import Recipe

OWN = "generate"
REPLAYED = 2  # requests whose forwards are made again alone
JUDGED_TOGETHER = 16  # pictures per call of those that are only looked at
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Held-out prompts for models of the zoo, judged by reading the pictures; else the user's."""
    batch, seed = selection.batch, selection.seed
    processor = formatter.processor
    if selection.prompts is not None or not formatter.source.startswith("zoo:"):
        timed = [formatter.request(group) for group in repeated(selection.prompts or ["0"], batch)]
        return of_requests(model, timed, batch=batch, processor=processor)
    groups, shown = scenes.held_out(selection.count, batch, seed)
    judged: list[Request] = []
    if settings.pictures:
        together = min(JUDGED_TOGETHER, settings.pictures)
        many, shown = scenes.held_out(settings.pictures, together, seed + 1)
        judged = [formatter.request(group) for group in many]
    timed = [formatter.request(group) for group in groups]
    qualities = (scenes.judged_by(partial(scenes.facts, shown)), ink_per_round(shown))
    return of_requests(model, timed, judged, qualities, batch, processor)


def of_requests(
    model: Any,
    timed: Sequence[Request],
    judged: Sequence[Request] = (),
    qualities: Sequence[Quality] = (),
    batch: int = 1,
    processor: Any = None,
) -> Workload:
    """Requests are arguments of `generate_images`; likelihood is a quality of all of them."""
    plain = accelerate(model, "plain", processor=processor)
    family = plain.session.image_family
    own: dict[str, Runner] = {} if family.peer is None else {OWN: OwnDrawing(plain)}
    why = f"{family.name} has no loop of its own that draws pictures"
    said = {name: value for name, value in timed[0].items() if _is_setting(name, family.inputs)}
    codes = plain.session.drawing(**timed[0]).grid.cells
    return Workload(
        timed=timed,
        plain=SpeculativeDrawing(plain),
        fast=SpeculativeDrawing,
        baselines=own,
        missing={} if own else {OWN: why},
        controls=partial(constant.controls, model, processor=processor),
        judged=judged,
        qualities=(*qualities, likelihood(plain, judged or timed)),
        batch=batch,
        is_greedy=said.get("temperature", 0.0) == 0,
        replayed=REPLAYED,
        toy_distance=toy_distance,
        settings={**said, "codes": codes},
        **placed(model),
    )


class SpeculativeDrawing(Speculative):
    """Our loop with some recipe."""

    def run(self, request: Request, seed: int) -> RunResult:
        out: Images = self.fast.generate_images(**request, seed=seed)
        tokens, stats = out.sequences.tolist(), out.stats
        count = sum(map(len, tokens))
        calls, exact = stats.target_calls, stats.exact
        return RunResult(tokens, count, calls, exact, out.images, stats, rounds=out.rounds)


@dataclass(frozen=True)
class OwnDrawing(Runner):
    """The model's own way to draw, where it has one."""

    plain: Accelerated

    def run(self, request: Request, seed: int) -> RunResult:
        drawing: Drawing = self.plain.session.drawing(**request)
        assert drawing.image_family.peer is not None
        torch.manual_seed(seed)
        sequences = drawing.image_family.peer(drawing.inputs, drawing.sampling)
        codes = drawing.image_family.codebook.codes[drawing.placed(sequences)]
        tokens = sequences.tolist()
        images = pictures(drawing.image_family.decode(codes))
        return RunResult(tokens, sum(map(len, tokens)), len(tokens[0]) - 1, output=images)


def likelihood(plain: Accelerated, requests: Sequence[Request]) -> Quality:
    """How likely the target finds the pictures, per code."""

    def values(answers: Sequence[RunResult], others: RunResults) -> list[tuple[float, float]]:
        found: list[float] = []
        for request, answer in zip(requests, answers, strict=True):
            drawing = plain.session.drawing(**request)
            sequences = torch.tensor(answer.values, device=plain.model.device)
            found += log_likelihood(plain, drawing, sequences).tolist()
        return [(one, 1.0) for one in found]

    return Quality("log likelihood", values)


def toy_distance(recipe: str, parts: Mapping[str, Any]) -> float | None:
    """The enumerated distance of a recipe with other parts, on a picture of four codes."""
    return toys.distance(toys.tiny_pair(recipes.get(recipe), 0, **parts).recipe)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Tiny models are counted; equality is asked of the user's own where there is one.

    Raises ValueError for a recipe that no tiny model can be bound to.
    """
    small = toys.tiny_pair(recipe, 0)
    fast = trial.fast or small
    return fast.recipe, _checks(fast, small, recipe, trial)


def _checks(fast: Accelerated, small: Accelerated, recipe: Recipe, trial: Trial) -> Iterator[Check]:
    plan = fast.recipe
    yield checks.enumeration(plan, small.recipe.verifier, toys.CODES)
    yield checks.frequency(
        plan, lambda seed: toys.drawing(toys.tiny_pair(recipe, seed)), trial, "codes"
    )
    mine, model = SpeculativeDrawing(fast), fast.model
    other = accelerate(model, "plain", processor=fast.session.processor)
    is_plain = isinstance(fast.session.bound.drafter, Silent)
    plain = None if is_plain else SpeculativeDrawing(other)
    wanted: Runner | None = plain
    whose = "plain decoding"
    if trial.fast is None:
        wanted, whose = toys.FromScratch(model), "distributions computed from scratch"
    elif fast.session.image_family.peer is not None:
        wanted, whose = OwnDrawing(other), "generate()"
    requests = trial.requests or [{**toys.painted(1), **toys.SETTINGS}]
    greedy = [{**one, "temperature": 0.0} for one in requests]
    yield checks.greedy_equality(plan, wanted, mine, greedy, trial, whose)
    sampled = [{"temperature": 1.0, **one} for one in requests]
    yield checks.seeded_equality(plan, plain, mine, sampled, trial)


def _is_setting(name: str, inputs: Sequence[str]) -> bool:
    """Whether an argument says how to draw, and not what."""
    return name not in (*inputs, "prompt", "negative")
