"""Workloads and certificates of language models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, get_args

from PIL import Image

from mmspec import zoo
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.workload import Scored, fact_accuracy, group_batches, repeat_prompts
from mmspec.modalities.common import measures
from mmspec.modalities.common.formatting import get_tokenizer
from mmspec.modalities.common.measures import request_workload
from mmspec.modalities.vlm import REQUEST_KINDS, tiny_models
from mmspec.modalities.vlm.formatting import CLIP, read_scene_clip
from mmspec.modalities.vlm.page_drafts import with_page_drafts
from mmspec.modality import RunResult, RunResults, Selection, Workload
from mmspec.recipe import Recipe
from mmspec.zoo import language
from mmspec.zoo.clip_questions import clip_examples, score_clip
from mmspec.zoo.requests import (
    CATEGORIES,
    Request,
    Turn,
    is_trained_on_requests,
    requests,
    score_turn,
    write_scene_into_prompt,
)

T = TypeVar("T")
SCENE_KINDS: tuple[language.ExampleKind, ...] = get_args(language.ExampleKind)
IMAGE_PROMPT = "Describe the picture in detail."
TEXT_PROMPTS = (
    "Write a short story about a lighthouse keeper and her dog.",
    "Explain how a bicycle stays upright.",
    "List the steps to repot a plant, one per line, and repeat them at the end.",
    "Translate into French: the weather was fine, so we walked to the harbour.",
)


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Make a workload: held-out examples scored by facts for bundled models, else user's prompts.

    Raises ValueError for `settings.kind` or `settings.examples` with the user's prompts, for a kind
    that the examples lack, and for examples with words that a bundled model does not know.
    """
    batch = selection.batch
    is_zoo = formatter.source.startswith("zoo:") and (
        formatter.sees or is_trained_on_requests(formatter.source)
    )
    has_media = settings.image is not None or settings.video is not None
    if is_zoo and selection.prompts is None and (settings.image, settings.video) == (None, CLIP):
        return _clip_workload(model, formatter, settings, selection)
    is_bundled = is_zoo and selection.prompts is None and not has_media
    if is_bundled and _selects_requests(formatter.source, settings):
        return _request_workload(model, formatter, settings, selection)
    if is_bundled and not formatter.sees:
        raise ValueError(
            f"{formatter.source} reads no image, and these examples have one; drop --examples, or "
            f"give --kind {', '.join(CATEGORIES)}"
        )
    if is_bundled:
        examples = language.examples(selection.count, "held-out", selection.seed, settings.kind)
        groups = group_batches(examples, batch)
        made = [_make_request(formatter, group) for group in groups]
        _check_words(formatter, made)
        examples = [example for group in groups for example in group]
        quality = fact_accuracy(partial(_facts, formatter.processor, examples, language.score))
        work = request_workload(model, made, quality, batch, selection.drafter)
        return with_page_drafts(work, [[one.image for one in group] for group in groups])
    for option in ("kind", "examples"):
        if (value := getattr(settings, option)) is not None:
            raise ValueError(
                f"--{option} {value} selects bundled examples, which are used for bundled models "
                f"without other prompts; drop --{option}, or --prompt, --image and --video"
            )
    texts, images = selection.prompts, None
    if texts is None and formatter.sees:
        texts = [IMAGE_PROMPT]
        images = None if has_media else [Image.open(zoo.bundled_scene()).convert("RGB")] * batch
    given = repeat_prompts(texts or TEXT_PROMPTS, batch)
    made = [formatter.request(group, images=images) for group in given]
    return request_workload(model, made, None, batch, selection.drafter)


def _selects_requests(source: str, settings: Any) -> bool:
    """Whether the examples are requests of six kinds. Raises ValueError for a kind they lack."""
    kind, selected = settings.kind, settings.examples
    if selected is None and kind in (None, "caption"):
        return is_trained_on_requests(source)
    if selected is None:
        return kind in REQUEST_KINDS
    kinds: Sequence[str] = CATEGORIES if selected == "requests" else SCENE_KINDS
    if kind is not None and kind not in kinds:
        raise ValueError(
            f"--examples {selected} has no --kind {kind}; choose one of {', '.join(kinds)}, or "
            "drop --examples"
        )
    return bool(selected == "requests")


def _check_words(formatter: Any, made: Sequence[Mapping[str, Any]]) -> None:
    """Refuse requests with words that a bundled model does not know. Raises ValueError."""
    tokenizer = get_tokenizer(formatter.processor)
    unknown = tokenizer.unk_token_id
    if unknown is None or not any(bool((one["input_ids"] == unknown).any()) for one in made):
        return
    raise ValueError(
        f"{formatter.source} does not know all words of these requests, and would read <unk> in "
        f"their place; it knows --kind {_known_kinds(tokenizer)}"
    )


def _known_kinds(tokenizer: Any) -> str:
    """The kinds of bundled examples without a word that a tokenizer does not know."""
    scenes = language.scenes(20, "held-out")
    prompts: dict[str, dict[str, list[str]]] = {
        "scenes": {k: [language.write(*one, k)[0] for one in scenes] for k in SCENE_KINDS},
        "requests": {
            k: [turn.prompt for one in requests(20, category=k) for turn in one.turns]
            for k in CATEGORIES
        },
    }

    def knows(texts: list[str]) -> bool:
        return all(tokenizer.unk_token_id not in row for row in tokenizer(texts).input_ids)

    known = {name: [k for k in of if knows(of[k])] for name, of in prompts.items()}
    return ", and ".join(
        f"{', '.join(kinds)} of --examples {name}" for name, kinds in known.items() if kinds
    )


def _request_workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Make a workload of held-out requests of six kinds, scored by facts.

    Every turn of a conversation is a request, with the correct answers of those before. To a text
    model, the first one describes the scene.
    """
    every = requests(selection.count, "held-out", selection.seed, settings.kind)
    if not formatter.sees:
        every = [write_scene_into_prompt(one) for one in every]
    turns = [_Asked(one, index) for one in every for index in range(len(one.turns))]
    groups = group_batches(turns, selection.batch)
    made = [
        formatter.request(
            [one.turn.prompt for one in group],
            images=[one.request.image for one in group] if formatter.sees else None,
            turns=[one.earlier for one in group],
        )
        for group in groups
    ]
    _check_words(formatter, made)
    turns = [one for group in groups for one in group]
    quality = fact_accuracy(partial(_facts, formatter.processor, turns, _score_turn))
    work = request_workload(model, made, quality, selection.batch, selection.drafter)
    if formatter.sees:
        work = with_page_drafts(work, [[one.request.image for one in group] for group in groups])
    return replace(work, extras=partial(_answer_length, len({id(one.request) for one in turns})))


@dataclass(frozen=True)
class _Asked:
    """One turn of a request."""

    request: Request
    index: int

    @property
    def turn(self) -> Turn:
        return self.request.turns[self.index]

    @property
    def earlier(self) -> list[tuple[str, str]]:
        return [(one.prompt, one.answer) for one in self.request.turns[: self.index]]


def _score_turn(asked: _Asked, text: str) -> tuple[int, int]:
    return score_turn(asked.request, asked.turn, text)


def _answer_length(
    count: int, answers: Sequence[RunResult], others: RunResults
) -> dict[str, float]:
    """Mean tokens of the answer to a request, of a conversation those of all turns."""
    return {"tokens per request": sum(one.count for one in answers) / count}


def _clip_workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Make a workload of held-out clips of moving scenes, scored by facts."""
    if settings.kind in REQUEST_KINDS:
        raise ValueError(f"--kind {settings.kind} is about images; drop --video, or --kind")
    if settings.examples is not None:
        raise ValueError(
            f"--examples {settings.examples} is about images; drop --video, or --examples"
        )
    examples = clip_examples(selection.count, "held-out", selection.seed, settings.kind)
    groups, made = group_batches(examples, selection.batch), []
    for group in groups:
        videos = [read_scene_clip(one.scene, settings) for one in group]
        made.append(formatter.request([one.prompt for one in group], videos=videos))
    examples = [example for group in groups for example in group]
    quality = fact_accuracy(partial(_facts, formatter.processor, examples, score_clip))
    return request_workload(model, made, quality, selection.batch, selection.drafter)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Certify a recipe on tiny language models and, if given, on the user's model.

    Raises ValueError for a recipe that needs image tokens.
    """
    return measures.certify(tiny_models, recipe, trial)


def _make_request(formatter: Any, examples: Sequence[language.Example]) -> dict[str, Any]:
    prompts, images = [one.prompt for one in examples], [one.image for one in examples]
    request: dict[str, Any] = formatter.request(prompts, images=images)
    return request


def _facts(
    processor: Any,
    examples: Sequence[T],
    score: Callable[[T, str], tuple[int, int]],
    answers: Sequence[RunResult],
) -> Scored:
    rows = [row for answer in answers for row in answer.values]
    texts = [get_tokenizer(processor).decode(row, skip_special_tokens=True) for row in rows]
    pairs = zip(examples, texts, strict=True)
    return [score(example, text) for example, text in pairs]
