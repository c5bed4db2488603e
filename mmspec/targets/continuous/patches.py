"""Pictures made of continuous tokens: some cells at a time, given all that are shown already.

A *token* of the loop is what one autoregressive step shows: K cells, each with the whole path that
its diffusion head took (`mmspec.targets.continuous.paths`), padded to the widest step.

    order     7  2  5 | 0  3 | 1  4  6        a permutation of the cells, drawn per picture
    step         0    |   1  |    2           how many are shown at a time follows a cosine

Given what is shown the cells of a step are independent, so distributions have the batch shape (B, N
+ 1, K).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from mmspec.distributions.noise import KeyedNoise, Keys
from mmspec.draft import Draft, Round, Scores
from mmspec.errors import check_flag, check_number
from mmspec.targets.continuous.paths import Head, PathDistribution

SCHEDULES = ("linear", "constant")
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PatchSettings:
    """How a picture is sampled: the target whose distribution an exact recipe keeps."""

    steps: int = 64  # autoregressive ones
    guidance: float = 1.0  # 1 = none
    schedule: str = "linear"  # of guidance: with the share of shown cells, or "constant"
    temperature: float = 1.0  # factor of the head's noise
    head_steps: int = 100
    last_noise: bool = False  # whether the head's last step adds noise, too

    def __post_init__(self) -> None:
        check_number("steps", self.steps, 1, whole=True, example=64)
        check_number("head_steps", self.head_steps, 2, whole=True, example=100)
        check_number("guidance", self.guidance, 0, example=3)
        check_number("temperature", self.temperature, 1e-8, 1e8)
        check_flag("last_noise", self.last_noise)
        if self.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ValueError(
                f"guidance_schedule={self.schedule!r} is not known; choose one of {known}"
            )

    def spans(self, cells: int) -> Spans:
        """First cell and end of every step in the order; shown cells grow like 1 - cos."""
        if self.steps > cells:
            raise ValueError(
                f"steps={self.steps} show less than one of {cells} cells each; give at most {cells}"
            )
        hidden, ends = cells, list[int]()
        for step in range(1, self.steps + 1):
            wanted = math.floor(cells * math.cos(math.pi / 2 * step / self.steps))
            hidden = max(1, min(hidden - 1, wanted)) if step < self.steps else 0
            ends.append(cells - hidden)
        return tuple(zip([0, *ends], ends, strict=False))

    def scales(self, reach: Tensor, cells: int) -> Tensor:  # (...) cells shown afterwards -> (...)
        """The guidance of the steps that reach so far."""
        if self.schedule == "constant":
            return torch.full_like(reach, self.guidance, dtype=torch.float32)
        return 1 + (self.guidance - 1) * reach.clamp_max(cells - 1).float() / cells


@dataclass(frozen=True)
class CellQuery:
    """R rows ask for the distributions of K cells each."""

    latents: Tensor  # (R, L, C)
    shown: Tensor  # (R, L) bool: which of them may be read
    cells: Tensor  # (R, K)
    real: Tensor  # (R, K) bool
    image: Tensor  # (R,) which picture each row is about
    reach: Tensor  # (R,) cells that are shown afterwards; guidance may depend on it


class PatchReader(Protocol):
    """An image model with its conditions, as the loop sees it."""

    @property
    def cells(self) -> int: ...  # L
    @property
    def head(self) -> Head: ...
    def distribution(self, asked: CellQuery) -> PathDistribution: ...  # batch (R, K)


@dataclass(frozen=True)
class PatchRequest:
    """One call."""

    plan: PatchSettings
    batch: int
    noise: KeyedNoise


@dataclass(frozen=True)
class CellBlock:
    """The cells of some steps."""

    cells: Tensor  # (B, M, K)
    real: Tensor  # (B, M, K) bool; none beyond the last step
    begin: Tensor  # (B, M) cells shown before
    end: Tensor  # (B, M) cells shown afterwards


@dataclass(frozen=True)
class Patches:
    """The context: what every picture shows so far."""

    request: PatchRequest
    latents: Tensor  # (B, L, C), zeros where nothing is shown
    order: Tensor  # (B, L) cells in the order of their turn
    spans: Spans
    states: int  # of a path
    step: tuple[int, ...]  # steps taken per picture
    noise: KeyedNoise
    finished: tuple[bool, ...] = ()
    scores: Scores | None = None
    prefix: None = None  # there are no ids
    shared: dict[str, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return len(self.step)

    @property
    def device(self) -> torch.device:
        return self.latents.device

    @property
    def event(self) -> tuple[int, int, int]:
        """K, S, C."""
        widest = max(end - begin for begin, end in self.spans)
        return widest, self.states, self.latents.shape[-1]

    def generated(self, row: int) -> int:
        return self.step[row]

    def emitted(self) -> list[list[Tensor]]:
        """What each picture shows."""
        ends = [self.spans[step - 1][1] if step else 0 for step in self.step]
        rows = zip(self.latents, self.order, ends, strict=True)
        return [list(latents[order[:end]]) for latents, order, end in rows]

    def nothing(self) -> Draft:
        """A draft without a node."""
        return Draft.empty(self.batch, self.device, self.latents.dtype, self.event)

    def at_round(self, index: int) -> Patches:
        return replace(self, noise=self.noise.at_round(index))

    def block(self, count: int) -> CellBlock:
        """The cells of the next `count` steps of every picture."""
        width, last = self.event[0], len(self.spans)
        table = torch.tensor([*self.spans, (self.order.shape[1],) * 2], device=self.device)
        step = torch.tensor(self.step, device=self.device)[:, None]
        step = (step + torch.arange(count, device=self.device)).clamp_max(last)
        begin, end = table[step].unbind(-1)
        place = begin[..., None] + torch.arange(width, device=self.device)
        real = place < end[..., None]
        rows = torch.arange(self.batch, device=self.device)[:, None, None]
        cells = self.order[rows, place.clamp_max(self.order.shape[1] - 1)]
        return CellBlock(cells, real, begin, end)

    def shown(self, begin: Tensor) -> Tensor:  # (B, M) -> (B, M, L) bool
        """Which cells are shown when so many are."""
        return self.order.argsort(-1)[:, None] < begin[..., None]


@dataclass(frozen=True)
class OfPictures:
    """Pictures that a model of patches draws, from empty ones on."""

    reader: PatchReader

    def prefill(self, request: PatchRequest) -> Patches:
        """Nothing is read: a picture starts empty."""
        return opened(self.reader, request)

    def keep(self, context: Patches, draft: Draft, kept: Round) -> Patches:
        return moved(context, kept)


class PatchTarget(OfPictures):
    """Scores drafted steps with one pass of the model: every step reads those before it.

    A bidirectional model keeps no memory, so a draft of N steps is N + 1 pictures side by side.
    """

    def score(self, context: Patches, draft: Draft) -> Scores:
        block = context.block(draft.nodes + 1)
        live = _root_and(draft, context) & block.real.any(-1)
        row, node = live.nonzero(as_tuple=True)
        latents, shown = filled(context, draft)[row], context.shown(block.begin)[row, node]
        cells, real, reach = (table[row, node] for table in (block.cells, block.real, block.end))
        distribution = self.reader.distribution(CellQuery(latents, shown, cells, real, row, reach))
        return Scores(distribution.among(live), places(block))


class BlindTarget(OfPictures):
    """Scores all drafted steps from what is shown now, as CSpD does: none reads another.

    One picture per row, and another distribution than step by step: that of a target with fewer,
    wider steps. It has nothing to say about the step behind a draft.
    """

    def score(self, context: Patches, draft: Draft) -> Scores:
        count = max(draft.nodes, 1)
        block = context.block(count)
        live = _root_and(draft, context)[:, -count:]
        real = (block.real & live[..., None]).flatten(1)
        reach = torch.where(live, block.end, 0).amax(-1)
        now = context.shown(block.begin)[:, 0]
        image = torch.arange(context.batch, device=context.device)
        asked = CellQuery(context.latents, now, block.cells.flatten(1), real, image, reach)
        distribution = self.reader.distribution(asked).reshape(*block.cells.shape)
        if draft.nodes:  # nothing is said about the step behind
            distribution = distribution[:, [*range(count), 0]]
            last = torch.arange(count + 1, device=context.device)[:, None] == count
            distribution = replace(distribution, real=distribution.real & ~last)
        return Scores(distribution, places(context.block(draft.nodes + 1)))


def opened(reader: PatchReader, request: PatchRequest) -> Patches:
    """The empty pictures of a request, with the order of their cells."""
    noise, batch, event = request.noise, request.batch, reader.head.event
    return Patches(
        request,
        torch.zeros(batch, reader.cells, *event, device=noise.rows.device),
        order(noise, reader.cells),
        request.plan.spans(reader.cells),
        reader.head.kernel.steps + 1,
        (0,) * batch,
        noise,
        (False,) * batch,
    )


def order(noise: KeyedNoise, cells: int) -> Tensor:  # (B, L)
    """A permutation per picture; keyed by position 0, cells by theirs plus 1."""
    start = torch.zeros(len(noise.rows), 1, dtype=torch.int64, device=noise.rows.device)
    return noise.shared(start).uniform(cells)[:, 0].argsort(-1)


def cell_keys(noise: KeyedNoise, cells: Tensor) -> Keys:  # (B, ...) -> keys of that shape
    """What drives the path of each cell, the same in plain sampling and in every draft."""
    return Keys(noise.shared(cells.flatten(1) + 1).key.view_as(cells))


def places(block: CellBlock) -> Tensor:  # (B, M, K)
    """The position that keys the noise of each cell."""
    return block.cells + 1


def filled(context: Patches, draft: Draft) -> Tensor:  # (B, L, C)
    """The latents with all that is drafted."""
    if not draft.nodes:
        return context.latents
    block = context.block(draft.nodes)
    row, node, place = (block.real & draft.mask[..., None]).nonzero(as_tuple=True)
    latents = context.latents.clone()
    latents[row, block.cells[row, node, place]] = draft.tokens[row, node, place, -1]
    return latents


def moved(context: Patches, kept: Round) -> Patches:
    """The pictures with what a round kept."""
    latents, step = context.latents.clone(), list(context.step)
    for row, tokens in enumerate(kept.tokens):
        place(latents[row], context.order[row], context.spans[step[row] :], tokens)
        step[row] += len(tokens)
    return replace(context, latents=latents, step=tuple(step), finished=kept.finished)


def place(latents: Tensor, turns: Tensor, spans: Spans, tokens: Sequence[Tensor]) -> None:
    """Write tokens (K, S, C) into a picture (L, C) whose cells take `turns` (L,)."""
    for (begin, end), token in zip(spans, tokens, strict=False):
        latents[turns[begin:end]] = token[: end - begin, -1]


def _root_and(draft: Draft, context: Patches) -> Tensor:  # (B, N + 1) bool
    """Which places of a score matter."""
    alive = torch.tensor([not done for done in context.finished], device=context.device)
    root = torch.ones(context.batch, 1, dtype=torch.bool, device=context.device)
    return torch.cat((root, draft.mask), 1) & alive[:, None]
