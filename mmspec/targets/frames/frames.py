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
NO_END = -1  # of a model in which no code of a frame decides about the frames after it
NEVER = 1 << 40  # the step of an end that has not begun


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
    guidance_top_k: int = 0  # of guidance that selects codes, greedy decoding included; 0 = none


class FrameReader(Protocol):
    """A model with several codebooks."""

    model: Any

    @property
    def books(self) -> int: ...  # K
    @property
    def size(self) -> int: ...  # codes per codebook, special ones included
    @property
    def is_parallel(self) -> bool: ...  # whether the codes of a frame are independent
    @property
    def end(self) -> int: ...  # code of the first book that begins the end of speech, or NO_END
    def begin(
        self, inputs: Mapping[str, Any], settings: FrameSettings
    ) -> tuple[list[FrameMemory], list[Outputs]]: ...  # per row; outputs of one position, (1, ...)
    def read(self, memory: FrameMemory, frames: Tensor) -> Outputs: ...  # (n, K) -> n positions
    def distribution(
        self, outputs: Outputs, steps: Tensor, ends: Tensor, settings: FrameSettings
    ) -> FrameDistribution: ...  # ends (B, M): the step before at which the end began, or NEVER
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
    ends: Tensor  # (B,) the step at which the end of speech began, or NEVER
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
        ends = torch.full((request.batch,), NEVER, device=request.noise.rows.device)
        context = Frames(request, history, memories, self.reader.books, request.noise, none, ends)
        nothing = context.empty_draft().tokens
        return replace(context, scores=make_scores(self.reader, outputs, context, nothing))

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
        return make_scores(self.reader, outputs, context, draft.tokens)

    def keep(self, context: Frames, draft: Draft, round_: Round) -> Frames:
        ends = context.ends.clone()
        for row, memory in enumerate(context.memories):
            before, new = len(context.history[row]), round_.tokens[row]
            if round_.calls and not context.finished[row]:
                memory.frames = before + round_.accepted[row]
            if new:
                steps = before + torch.arange(len(new) + 1, device=ends.device)
                codes = torch.stack(list(new))[None]
                ends[row] = find_ends(self.reader, ends[row, None], codes, steps)[0, -1]
            context.history[row].extend(new)
        return replace(context, scores=None, finished=round_.finished, ends=ends)


def make_scores(
    reader: FrameReader, outputs: Sequence[Outputs], context: Frames, drafted: Tensor
) -> Scores:
    """Distributions (B, M) of the outputs per row; a finished row repeats another one.

    The last output follows all `drafted` frames (B, n, K) of the row, the one before it all but one
    of them, and so on: M is at most n + 1.
    """
    some = next(one for one in outputs if one)
    filled = [one or some for one in outputs]
    joined = tuple(torch.stack(parts) for parts in zip(*filled, strict=True))
    steps = context.steps + torch.arange(drafted.shape[1] + 1, device=context.device)
    ends = find_ends(reader, context.ends, drafted, steps)
    steps, ends = (one[:, -joined[0].shape[1] :] for one in (steps, ends))
    return Scores(reader.distribution(joined, steps, ends, context.request.settings), steps)


def find_ends(reader: FrameReader, before: Tensor, frames: Tensor, steps: Tensor) -> Tensor:
    """The step at which the end began before each position (B, n + 1), or NEVER.

    `before` (B,) is that before the first of the `frames` (B, n, K), which are those of all `steps`
    (B, n + 1) but the last. A position sees the frames of its own path alone:

        first codes    a    b   end   c
        step           7    8    9   10   11
        ends         NEVER  ..   ..   9    9
    """
    begun = torch.where(frames[..., 0] == reader.end, steps[..., :-1], NEVER)
    return torch.cat((before[:, None], begun), 1).cummin(1).values


@dataclass(frozen=True)
class FrameStop:
    """A row ends after `max_frames`, or with a frame whose codes of `books` are all `eos`."""

    max_frames: int
    eos: int | None = None
    books: tuple[int, ...] = ()

    def cut(
        self, row: int, emitted_before: int, tokens: Sequence[Tensor], prefix: Any = None
    ) -> tuple[int, bool]:
        """Return how many new frames are kept, and whether the row is finished; as `Stop.cut`."""
        left = self.max_frames - emitted_before
        kept = min(len(tokens), max(left, 0))
        if self.eos is not None and kept:
            ended = (torch.stack(list(tokens[:kept]))[:, list(self.books)] == self.eos).all(-1)
            first = ended.int().argmax()
            if bool(ended[first]):
                return int(first) + 1, True
        return kept, kept >= left

    def handle_broken(self, row: int, error: ValueError) -> None:
        """As `Stop.handle_broken`: raises the error."""
        raise error
