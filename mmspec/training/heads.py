"""Teach a feature head what its target is going to say.

reader = accelerate(model, "plain").backbone           # the target, frozen
head = FeatureHead(FeatureHeadConfig.of(reader.config, reader.vocabulary))
learn(EAGLE, reader, head, lessons, steps=2000, rate=1e-3)
head.save_pretrained(folder)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.draft import Draft, Kind
from mmspec.drafters.neural.feature_head import attention_of, check_head, tap_of
from mmspec.drafters.neural.head_prompt import HeadPrompt, ReadPrompt, head_prompt
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.models.heads.state_head import StateHead
from mmspec.targets.memory import block
from mmspec.targets.readers.attention_tap import AttentionTap
from mmspec.targets.readers.hooks import HiddenStateHook, LayerStatesHook, wanted_layers
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.causal import questions
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.trainable import HeadTraining


@dataclass(frozen=True)
class Lesson:
    """Requests and what is said to them, best by the target itself.

    `inputs` are the target's: of `generate`, or, for a model that draws, what its family makes of a
    request, with `guidance_scale` (any but 1) and `negative` to learn both branches. `tokens` (B,
    T) follow the prompts; behind the end of a row they are -1.
    """

    inputs: Mapping[str, Any]
    tokens: Tensor
    cache: FeatureCache | None = None  # of what the target makes of it
    questions: Sequence[int] = ()  # that the rows are in there


def head_loss(
    reader: Reader, head: StateHead, lesson: Lesson, noise: float = 0.1, weight: float = 0.1
) -> Tensor:  # ()
    """EAGLE's loss over a lesson (Li et al. 2024, section 4.2), in which states are continued.

    Smooth L1 between the states, plus `weight` times the cross entropy against the target's
    distribution, over the tokens of the lesson; the states that go in carry uniform noise of
    +-`noise`.
    """
    out, wanted = said_and_wanted(reader, head, lesson, noise)
    distribution = reader.head(wanted).float().softmax(-1)
    said = reader.head(out).float().log_softmax(-1)
    spoken: Tensor = (distribution * said).sum(-1).mean()
    return functional.smooth_l1_loss(out, wanted) - weight * spoken


def said_and_wanted(
    reader: Reader, head: StateHead, lesson: Lesson, noise: float
) -> tuple[Tensor, Tensor]:  # (n, D) each
    """What a head gives at the n real tokens of a lesson, and the states that they lead to."""
    read, prompt = read_noisy(reader, head, lesson, noise)
    said = through_prompt(head, prompt)[:, -read.next.shape[1] :]
    return said[read.real], read.next[read.real]


def read_noisy(
    reader: Reader, head: StateHead, lesson: Lesson, noise: float
) -> tuple[ReadLesson, HeadPrompt]:
    """A lesson as it was read, and as a head reads it with uniform noise of +-`noise` on states."""
    read = read_lesson(reader, lesson, *told_to(head, reader))
    return read, head_prompt(head, reader, shaken(read.prompt, noise))


def told_to(head: StateHead, reader: Reader) -> tuple[str, frozenset[str]]:
    """Names of the features and of the attention that a head is told of a lesson."""
    return tap_of(head, reader), attention_of(head, reader)


def new_head(target: Reader, counts: Tensor, **changes: Any) -> FeatureHead:
    """An untrained head for a target."""
    return FeatureHead(FeatureHeadConfig.of(target.config, target.vocabulary, **changes))


def check_continues(head: StateHead, reader: Reader) -> None:
    """Refuse a head whose states are not the target's last. Raises ValueError."""
    check_head(head, reader)
    if tap_of(head, reader) != "hidden":
        raise ValueError(
            f"a {type(head).__name__} gives states of its own, which no state of the target can "
            "teach; train it by mmspec.training.self_fed.EAGLE3"
        )


EAGLE = HeadTraining(new_head, head_loss, check_continues)


@dataclass(frozen=True)
class Pairs:
    """A lesson as a target read it: slot t holds token t + 1 and the state of slot t.

    R rows are B, or 2B with both branches; L slots of the prompt come before T of new tokens.
    """

    embeds: Tensor  # (R, L + T - 1, D)
    states: Tensor  # (R, L + T - 1, D)
    seen: Tensor  # (R, L + T - 1) bool, False = padding in front of a prompt
    next: Tensor  # (R, T, D) the states that the last T slots lead to
    real: Tensor  # (R, T) bool, False = behind the end of a row


@dataclass(frozen=True)
class ReadLesson:
    """A lesson as a head is told of it: all that the target read, and what it said of it."""

    prompt: ReadPrompt  # of L + T tokens
    next: Tensor  # (R, T, D) the last states that the last T slots lead to
    real: Tensor  # (R, T) bool, False = behind the end of a row


def read(reader: Reader, lesson: Lesson) -> Pairs:
    """Let the target read a lesson."""
    found = read_lesson(reader, lesson, "hidden")
    told = found.prompt
    slots = torch.arange(told.embeds.shape[1] - 1, device=told.embeds.device)
    seen = slots >= torch.tensor(told.padding, device=slots.device)[:, None]
    return Pairs(told.embeds[:, 1:], told.features[:, :-1], seen, found.next, found.real)


@torch.no_grad()
def read_lesson(
    reader: Reader,
    lesson: Lesson,
    tap: str,
    attention: frozenset[str] = frozenset(),
    beside: AbstractContextManager[Any] | None = None,
) -> ReadLesson:
    """Let the target read a lesson, and note features and attention of these names.

    `beside` is entered while it reads what was said. A lesson with a cache is read from there,
    where it has all of its rows, and noted there where not. Raises ValueError for attention of
    such a lesson, or what is `beside` it: no cache holds those.
    """
    cache = lesson.cache
    if cache is None:
        return _read_by_target(reader, lesson, tap, attention, beside)
    if attention or beside is not None:
        raise ValueError(
            "this head is taught more of the target than hidden states, such as its attention, "
            "which no cache holds; drop --cache"
        )
    if not all(cache.known(tap, one) for one in lesson.questions):
        cache.keep(lesson.questions, _read_by_target(reader, lesson, tap, attention, beside), tap)
    tokens, real = lesson.tokens.clamp_min(0), lesson.tokens >= 0
    ids = _ids(lesson.inputs, tokens, len(tokens))
    prompt, after = cache.rows(lesson.questions, ids, real, reader.embed(tokens))
    return ReadLesson(prompt, after, real)


def _read_by_target(
    reader: Reader,
    lesson: Lesson,
    tap: str,
    attention: frozenset[str],
    beside: AbstractContextManager[Any] | None,
) -> ReadLesson:
    tokens = lesson.tokens.clamp_min(0)
    layers = wanted_layers({tap}).get(tap, ())
    tapped = _tap(reader, lesson, attention)
    with HiddenStateHook(reader) as prompt, LayerStatesHook(reader, layers) as before, tapped:
        memory, _, _ = reader.prefill(lesson.inputs, room=tokens.shape[1])
    said = Draft.chain(tokens[:, 1:], Kind.DET)
    layout = block(tokens[:, :1].tolist(), said, memory.like)
    with LayerStatesHook(reader, layers) as behind, beside or nullcontext():
        _, after = reader.read(memory, layout, hidden=True)
    assert after is not None
    branches = len(after) // len(tokens)
    new = reader.embed(tokens).repeat(branches, 1, 1)
    features = torch.cat(
        (before.offer(), behind.offer(tokens.shape[1])) if layers else (prompt.hidden, after), 1
    )
    told = ReadPrompt(
        torch.cat((prompt.embeds, new), 1),
        features,
        memory.padding,
        _ids(lesson.inputs, tokens, len(features)),
        _behind(prompt.positions, tokens.shape[1]),
        _to_prompt(tapped, tokens.shape[1]),
        tokens.shape[1],
    )
    return ReadLesson(told, after, (lesson.tokens >= 0).repeat(branches, 1))


def _tap(reader: Reader, lesson: Lesson, attention: frozenset[str]) -> AbstractContextManager[Any]:
    if not attention:
        return nullcontext()
    return AttentionTap(reader, attention, questions(lesson.inputs, reader.visual_ids))


def _to_prompt(tapped: Any, count: int) -> dict[str, Tensor]:  # (R, L + count) each
    """Attention to every token of a prompt, and none to the `count` behind it."""
    noted = tapped.offer() if isinstance(tapped, AttentionTap) else {}
    return {name: functional.pad(one, (0, count)) for name, one in noted.items()}


def _ids(inputs: Mapping[str, Any], tokens: Tensor, rows: int) -> Tensor | None:
    """The ids of prompt and answer; None where they are not known."""
    ids = inputs.get("input_ids")
    return None if ids is None or len(ids) != rows else torch.cat((ids, tokens), 1)


def _behind(positions: Tensor | None, count: int) -> Tensor | None:
    """A prompt's positions and those of `count` tokens behind it."""
    if positions is None:
        return None
    steps = torch.arange(1, count + 1, device=positions.device)
    return torch.cat((positions, positions[..., -1:] + steps), -1)


def shaken(prompt: ReadPrompt, noise: float) -> ReadPrompt:
    """The same with uniform noise of +-`noise` on the features of its slots."""
    features = prompt.features[:, :-1]
    features = features + noise * (2 * torch.rand_like(features) - 1)
    return replace(prompt, features=torch.cat((features, prompt.features[:, -1:]), 1))


def through_prompt(head: StateHead, read: HeadPrompt) -> Tensor:  # (R, n, D)
    """States behind all slots of a prompt."""
    mask = read.seen if any(read.pads) else None
    out: Tensor = head(read.embeds, read.states, mask, read.positions, marks=read.marks)
    return out
