"""The target of models with several codebooks: a token of the loop is a frame of K codes.

Rows are read one by one, because such models take positions from their cache; rejected frames are
rolled back at no cost (`mmspec.targets.cache`). Drafts are chains of frames.
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

Outputs = tuple[Tensor, ...]  # of n positions: (n, ...) each


@dataclass
class FrameMemory:
    """The cache of one row; mutable."""

    cache: SlotCache
    prompt: int  # slots
    frames: int = 0  # committed after the prompt
    step_inputs: Mapping[str, Any] = field(default_factory=dict)  # further arguments of every step
    model_cache: Any = None  # passed to the model in place of the cache

    def plan(self, count: int) -> None:
        """Plan to write `count` frames after the committed ones."""
        self.cache.plan_uniform(self.prompt + self.frames, count)


@dataclass(frozen=True)
class FrameSettings:
    """How frames are sampled, and the maximum number of them."""

    sampling: Sampling
    depth: Sampling  # of codes after the first, with a depth decoder
    max_frames: int  # new frames
    guidance: float = 1.0  # 1 = none


class FrameReader(Protocol):
    """A model with several codebooks."""

    model: Any

    @property
    def books(self) -> int: ...  # K
    @property
    def size(self) -> int: ...  # codes per codebook, special ones included
    @property
    def is_parallel(self) -> bool: ...  # whether the codes of a frame are independent
    def begin(
        self, inputs: Mapping[str, Any], settings: FrameSettings
    ) -> tuple[list[FrameMemory], list[Outputs]]: ...  # per row; outputs of one position, (1, ...)
    def read(self, memory: FrameMemory, frames: Tensor) -> Outputs: ...  # (n, K) -> n positions
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
    prefix: None = None  # stop conditions read no codes

    @property
    def batch(self) -> int:
        return len(self.history)

    @property
    def device(self) -> torch.device:
        return self.noise.rows.device

    @property
    def steps(self) -> Tensor:  # (B, 1)
        """Number of frames per row."""
        return torch.tensor([[len(row)] for row in self.history], device=self.device)

    @property
    def max_draft_frames(self) -> int:
        """Maximum frames of a draft, as the target adds one."""
        rows = zip(self.history, self.finished, strict=True)
        left = [self.request.settings.max_frames - len(row) for row, done in rows if not done]
        return max(max(left, default=0) - 1, 0)

    def num_generated(self, row: int) -> int:
        return len(self.history[row])

    def generated_tokens(self) -> list[list[Tensor]]:
        return [list(row) for row in self.history]

    def empty_draft(self) -> Draft:
        return Draft.empty(self.batch, self.device, event=(self.books,))

    def at_round(self, index: int) -> Frames:
        return replace(self, noise=self.noise.at_round(index))

    def unread_frames(self, row: int, memory: FrameMemory) -> Tensor:  # (n, K)
        """Frames of a row that are not in a memory yet."""
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
            context, scores=make_scores(self.reader, outputs, context.steps, request.settings)
        )

    def score(self, context: Frames, draft: Draft) -> Scores:
        outputs: list[Outputs] = []
        for row, memory in enumerate(context.memories):
            if context.finished[row]:
                outputs.append(())
                continue
            frames = torch.cat((context.unread_frames(row, memory), draft.tokens[row]))
            memory.plan(len(frames))
            read = self.reader.read(memory, frames)
            outputs.append(tuple(one[-1 - draft.nodes :] for one in read))
        return make_scores(self.reader, outputs, context.steps, context.request.settings)

    def keep(self, context: Frames, draft: Draft, round_: Round) -> Frames:
        for row, memory in enumerate(context.memories):
            if round_.calls and not context.finished[row]:
                memory.frames = len(context.history[row]) + round_.accepted[row]
            context.history[row].extend(round_.tokens[row])
        return replace(context, scores=None, finished=round_.finished)


def make_scores(
    reader: FrameReader, outputs: Sequence[Outputs], steps: Tensor, settings: FrameSettings
) -> Scores:
    """Distributions (B, M) of the outputs per row; a finished row repeats another one."""
    some = next(one for one in outputs if one)
    filled = [one or some for one in outputs]
    joined = tuple(torch.stack(parts) for parts in zip(*filled, strict=True))
    steps = steps + torch.arange(joined[0].shape[1], device=steps.device)
    return Scores(reader.distribution(joined, steps, settings), steps)


@dataclass(frozen=True)
class FrameStop:
    """A row ends after `max_frames`, or with a frame whose first `books` codes are all `eos`."""

    max_frames: int
    eos: int | None = None
    books: int = 0

    def cut(
        self, row: int, emitted_before: int, tokens: Sequence[Tensor], prefix: Any = None
    ) -> tuple[int, bool]:
        """Return how many new frames are kept, and whether the row is finished; as `Stop.cut`."""
        left = self.max_frames - emitted_before
        kept = min(len(tokens), max(left, 0))
        if self.eos is not None and kept:
            ended = (torch.stack(list(tokens[:kept]))[:, : self.books] == self.eos).all(-1)
            first = ended.int().argmax()
            if bool(ended[first]):
                return int(first) + 1, True
        return kept, kept >= left

    def handle_broken(self, row: int, error: ValueError) -> None:
        """As `Stop.handle_broken`: raises the error."""
        raise error
