"""How models that write are measured: what they are asked, by whom, and who answers beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from PIL import Image

from mmspec import zoo
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.workload import Scored, facts_right, grouped, repeated
from mmspec.modalities.common import measures
from mmspec.modalities.common.measures import of_requests
from mmspec.modalities.vlm import toys
from mmspec.modalities.vlm.formatting import CLIP, of_the_zoo
from mmspec.modality import RunResult, Selection, Workload
from mmspec.recipe import Recipe
from mmspec.zoo import language
from mmspec.zoo.happenings import clip_examples, score_clip

T = TypeVar("T")
LOOK = "Describe the picture in detail."
QUESTIONS = (
    "Write a short story about a lighthouse keeper and her dog.",
    "Explain how a bicycle stays upright.",
    "List the steps to repot a plant, one per line, and repeat them at the end.",
    "Translate into French: the weather was fine, so we walked to the harbour.",
)


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Held-out scenes for models of the zoo, judged by facts; else what the user asks.

    Raises ValueError for a kind of the former where the latter is asked.
    """
    batch = selection.batch
    is_zoo = formatter.source.startswith("zoo:") and formatter.sees
    is_asked = settings.image is not None or settings.video is not None
    if is_zoo and selection.prompts is None and (settings.image, settings.video) == (None, CLIP):
        return _of_clips(model, formatter, settings, selection)
    if is_zoo and selection.prompts is None and not is_asked:
        examples = language.examples(selection.count, "held-out", selection.seed, settings.kind)
        groups = grouped(examples, batch)
        asked = [_shown(formatter, group) for group in groups]
        shown = [example for group in groups for example in group]
        quality = facts_right(partial(_facts, formatter.processor, shown, language.score))
        return of_requests(model, asked, quality, batch, selection.drafter)
    if settings.kind is not None:
        raise ValueError(
            f"--kind {settings.kind} is of the zoo's examples, which a model of the zoo is asked "
            "where nothing else is said; drop --kind, or --prompt, --image and --video"
        )
    bundled = Image.open(zoo.bundled_scene()).convert("RGB")
    images = [bundled] * batch if formatter.sees and not is_asked else None
    texts = repeated(selection.prompts or ([LOOK] if formatter.sees else QUESTIONS), batch)
    asked = [formatter.request(group, images=images) for group in texts]
    return of_requests(model, asked, None, batch, selection.drafter)


def _of_clips(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Held-out clips of moving scenes, judged by facts."""
    examples = clip_examples(selection.count, "held-out", selection.seed, settings.kind)
    asked, shown = [], []
    for group in grouped(examples, selection.batch):
        films = [of_the_zoo(one.frames, settings) for one in group]
        asked.append(formatter.request([one.prompt for one in group], films=films))
        shown += group
    quality = facts_right(partial(_facts, formatter.processor, shown, score_clip))
    return of_requests(model, asked, quality, selection.batch, selection.drafter)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """As for any model of token ids; the tiny ones are language models.

    Raises ValueError for a recipe that needs picture tokens.
    """
    return measures.certify(toys, recipe, trial)


def _shown(formatter: Any, examples: Sequence[language.Example]) -> dict[str, Any]:
    prompts, images = [one.prompt for one in examples], [one.image for one in examples]
    asked: dict[str, Any] = formatter.request(prompts, images=images)
    return asked


def _facts(
    processor: Any,
    examples: Sequence[T],
    score: Callable[[T, str], tuple[int, int]],
    answers: Sequence[RunResult],
) -> Scored:
    rows = [row for answer in answers for row in answer.values]
    texts = [processor.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    pairs = zip(examples, texts, strict=True)
    return [score(example, text) for example, text in pairs]
