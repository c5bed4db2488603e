"""Models of several codebooks behind three calls: a token of the loop is a frame of K codes.

Rows are read one by one, because such models count positions by their cache; what was rejected is
forgotten for free (`mmspec.targets.cache`). Drafts are chains of frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Round, Scores
from mmspec.targets.cache import SlotCache
from mmspec.targets.frames.frame_distributions import FrameDistribution

Outputs = tuple[Tensor, ...]  # of some places: (n, ...) each


@dataclass
class FrameMemory:
    """What a model remembers of one row; the one mutable thing of it."""

    cache: SlotCache
    prompt: int  # slots
    frames: int = 0  # kept behind the prompt
    carried: Mapping[str, Any] = field(default_factory=dict)  # further arguments of every step
    beside: Any = None  # what the model is handed in place of the cache

    def plan(self, count: int) -> None:
        """Write the next `count` frames behind what is kept."""
        self.cache.plan_uniform(self.prompt + self.frames, count)


@dataclass(frozen=True)
class FrameSettings:
    """How frames are drawn, and how many there may be."""

    sampling: Sampling
    depth: Sampling  # of codes behind the first, where a depth decoder says them
    most: int  # new frames
    guidance: float = 1.0  # 1 = none


class FrameReader(Protocol):
    """A model of several codebooks."""

    model: Any

    @property
    def books(self) -> int: ...  # K
    @property
    def size(self) -> int: ...  # codes per book, those that only a distribution has included
    @property
    def is_parallel(self) -> bool: ...  # whether the codes of a frame are independent
    def begin(
        self, inputs: Mapping[str, Any], settings: FrameSettings
    ) -> tuple[list[FrameMemory], list[Outputs]]: ...  # per row; outputs of one place, (1, ...)
    def read(self, memory: FrameMemory, frames: Tensor) -> Outputs: ...  # (n, K) -> of n places
    def distribution(
        self, outputs: Outputs, steps: Tensor, settings: FrameSettings
    ) -> FrameDistribution: ...
    def like(self, model: Any) -> FrameReader: ...  # of a draft model; ValueError if none


@dataclass(frozen=True)
class FrameRequest:
    """One call."""

    inputs: Mapping[str, Any]
    settings: FrameSettings
    noise: KeyedNoise

    @property
    def batch(self) -> int:
        return len(self.noise.rows)


@dataclass(frozen=True)
class Frames:
    """The context: the frames of every row so far."""

    request: FrameRequest
    history: tuple[list[Tensor], ...]  # (K,) each
    memories: list[FrameMemory]
    books: int
    noise: KeyedNoise
    finished: tuple[bool, ...]
    scores: Scores | None = None
    prefix: None = None  # nobody looks at the codes before

    @property
    def batch(self) -> int:
        return len(self.history)

    @property
    def device(self) -> torch.device:
        return self.noise.rows.device

    @property
    def steps(self) -> Tensor:  # (B, 1)
        """How many frames every row has."""
        return torch.tensor([[len(row)] for row in self.history], device=self.device)

    @property
    def useful(self) -> int:
        """Frames that a draft may have: behind them comes one of the target."""
        rows = zip(self.history, self.finished, strict=True)
        left = [self.request.settings.most - len(row) for row, done in rows if not done]
        return max(max(left, default=0) - 1, 0)

    def generated(self, row: int) -> int:
        return len(self.history[row])

    def emitted(self) -> list[list[Tensor]]:
        return [list(row) for row in self.history]

    def nothing(self) -> Draft:
        return Draft.empty(self.batch, self.device, event=(self.books,))

    def at_round(self, index: int) -> Frames:
        return replace(self, noise=self.noise.at_round(index))

    def unread(self, row: int, memory: FrameMemory) -> Tensor:  # (n, K)
        """Frames of a row that a memory does not hold."""
        return torch.stack(self.history[row][memory.frames :])


@dataclass(frozen=True)
class FrameTarget:
    """Scores drafted frames with one pass of the model per row, and one of its depth decoder."""

    reader: FrameReader

    def prefill(self, request: FrameRequest) -> Frames:
        memories, outputs = self.reader.begin(request.inputs, request.settings)
        none = (False,) * request.batch
        history = tuple(list[Tensor]() for _ in none)
        context = Frames(request, history, memories, self.reader.books, request.noise, none)
        return replace(
            context, scores=scored(self.reader, outputs, context.steps, request.settings)
        )

    def score(self, context: Frames, draft: Draft) -> Scores:
        outputs: list[Outputs] = []
        for row, memory in enumerate(context.memories):
            if context.finished[row]:
                outputs.append(())
                continue
            frames = torch.cat((context.unread(row, memory), draft.tokens[row]))
            memory.plan(len(frames))
            read = self.reader.read(memory, frames)
            outputs.append(tuple(one[-1 - draft.nodes :] for one in read))
        return scored(self.reader, outputs, context.steps, context.request.settings)

    def keep(self, context: Frames, draft: Draft, kept: Round) -> Frames:
        for row, memory in enumerate(context.memories):
            if kept.calls and not context.finished[row]:
                memory.frames = len(context.history[row]) + kept.accepted[row]
            context.history[row].extend(kept.tokens[row])
        return replace(context, scores=None, finished=kept.finished)


def scored(
    reader: FrameReader, outputs: Sequence[Outputs], steps: Tensor, settings: FrameSettings
) -> Scores:
    """Distributions (B, M) of what a reader said of every row; of a row that is over, of another one."""
    some = next(one for one in outputs if one)
    filled = [one or some for one in outputs]
    joined = tuple(torch.stack(parts) for parts in zip(*filled, strict=True))
    steps = steps + torch.arange(joined[0].shape[1], device=steps.device)
    return Scores(reader.distribution(joined, steps, settings), steps)


@dataclass(frozen=True)
class FrameStop:
    """A row ends after so many frames, or with one whose first `books` codes are all `eos`."""

    most: int
    eos: int | None = None
    books: int = 0

    def cut(
        self, row: int, emitted_before: int, tokens: Sequence[Tensor], prefix: Any = None
    ) -> tuple[int, bool]:
        """How many new frames are kept, and whether the row is over; as `Stop.cut`."""
        room = self.most - emitted_before
        kept = min(len(tokens), max(room, 0))
        if self.eos is not None and kept:
            ended = (torch.stack(list(tokens[:kept]))[:, : self.books] == self.eos).all(-1)
            first = ended.int().argmax()
            if bool(ended[first]):
                return int(first) + 1, True
        return kept, kept >= room
