"""Images of continuous tokens, generated a few cells per step given the visible cells.

A *token* of the loop is one autoregressive step: K cells, each with the whole path of its diffusion
head (`mmspec.targets.continuous.paths`), padded to the widest step.

    order     7  2  5 | 0  3 | 1  4  6        a random permutation of the cells per image
    step         0    |   1  |    2           the number of cells per step follows a cosine

Given the visible cells, the cells of a step are independent, so distributions have the batch shape
(B, N + 1, K).
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
    """Sampling settings of an image; they define the target distribution of exact recipes."""

    steps: int = 64  # autoregressive steps
    guidance: float = 1.0  # 1 = none
    schedule: str = "linear"  # of guidance: in the share of visible cells, or "constant"
    temperature: float = 1.0  # factor of the head's noise
    head_steps: int = 100
    last_noise: bool = False  # whether the head's last step adds noise as well

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
        """First cell and end of every step in the order; visible cells grow like 1 - cos."""
        if self.steps > cells:
            raise ValueError(
                f"steps={self.steps} must be at most the number of cells; give at most {cells}"
            )
        hidden, ends = cells, list[int]()
        for step in range(1, self.steps + 1):
            target = math.floor(cells * math.cos(math.pi / 2 * step / self.steps))
            hidden = max(1, min(hidden - 1, target)) if step < self.steps else 0
            ends.append(cells - hidden)
        return tuple(zip([0, *ends], ends, strict=False))

    def scales(
        self, reach: Tensor, cells: int
    ) -> Tensor:  # (...) cells visible afterwards -> (...)
        """The guidance scale of steps by the number of cells visible afterwards."""
        if self.schedule == "constant":
            return torch.full_like(reach, self.guidance, dtype=torch.float32)
        return 1 + (float(self.guidance) - 1) * reach.clamp_max(cells - 1).float() / cells


@dataclass(frozen=True)
class CellQuery:
    """A query of R rows for the distributions of K cells each."""

    latents: Tensor  # (R, L, C)
    visible: Tensor  # (R, L) bool: which of them are read
    cells: Tensor  # (R, K)
    real: Tensor  # (R, K) bool
    image: Tensor  # (R,) image of each row
    reach: Tensor  # (R,) cells that are visible afterwards; guidance may depend on it


class PatchReader(Protocol):
    """An image model with its conditions."""

    @property
    def cells(self) -> int: ...  # L
    @property
    def head(self) -> Head: ...
    def distribution(self, query: CellQuery) -> PathDistribution: ...  # batch (R, K)


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
    begin: Tensor  # (B, M) cells visible before
    end: Tensor  # (B, M) cells visible afterwards


@dataclass(frozen=True)
class Patches:
    """The context: the visible cells of every image."""

    request: PatchRequest
    latents: Tensor  # (B, L, C), zeros where not visible
    order: Tensor  # (B, L) cells in generation order
    spans: Spans
    states: int  # of a path
    step: tuple[int, ...]  # steps taken per image
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

    def num_generated(self, row: int) -> int:
        return self.step[row]

    def generated_tokens(self) -> list[list[Tensor]]:
        """The visible cells of each image, in order."""
        ends = [self.spans[step - 1][1] if step else 0 for step in self.step]
        rows = zip(self.latents, self.order, ends, strict=True)
        return [list(latents[order[:end]]) for latents, order, end in rows]

    def empty_draft(self) -> Draft:
        """A draft without nodes."""
        return Draft.empty(self.batch, self.device, self.latents.dtype, self.event)

    def at_round(self, index: int) -> Patches:
        return replace(self, noise=self.noise.at_round(index))

    def block(self, count: int) -> CellBlock:
        """The cells of the next `count` steps of every image."""
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

    def visible_mask(self, begin: Tensor) -> Tensor:  # (B, M) -> (B, M, L) bool
        """Which cells are visible after `begin` of them were generated."""
        return self.order.argsort(-1)[:, None] < begin[..., None]


@dataclass(frozen=True)
class ImageTargetBase:
    """A target of images, starting from empty ones."""

    reader: PatchReader

    def prefill(self, request: PatchRequest) -> Patches:
        """Start with empty images; nothing is read."""
        return start_images(self.reader, request)

    def keep(self, context: Patches, draft: Draft, round_: Round) -> Patches:
        return apply_round(context, round_)


class PatchTarget(ImageTargetBase):
    """Scores drafted steps with one pass of the model: every step reads those before it.

    A bidirectional model has no cache, so a draft of N steps is a batch of N + 1 images per row.
    """

    def score(self, context: Patches, draft: Draft) -> Scores:
        block = context.block(draft.nodes + 1)
        live = _root_and(draft, context) & block.real.any(-1)
        row, node = live.nonzero(as_tuple=True)
        latents, shown = (
            fill_latents(context, draft)[row],
            context.visible_mask(block.begin)[row, node],
        )
        cells, real, reach = (table[row, node] for table in (block.cells, block.real, block.end))
        distribution = self.reader.distribution(CellQuery(latents, shown, cells, real, row, reach))
        return Scores(distribution.scatter(live), cell_positions(block))


class BlindTarget(ImageTargetBase):
    """Scores all drafted steps from the currently visible cells (CSpD); none reads another.

    One image per row. The distribution differs from stepwise generation: it is that of a target
    with fewer, wider steps. The step after a draft is not scored.
    """

    def score(self, context: Patches, draft: Draft) -> Scores:
        count = max(draft.nodes, 1)
        block = context.block(count)
        live = _root_and(draft, context)[:, -count:]
        real = (block.real & live[..., None]).flatten(1)
        reach = torch.where(live, block.end, 0).amax(-1)
        now = context.visible_mask(block.begin)[:, 0]
        image = torch.arange(context.batch, device=context.device)
        query = CellQuery(context.latents, now, block.cells.flatten(1), real, image, reach)
        distribution = self.reader.distribution(query).reshape(*block.cells.shape)
        if draft.nodes:  # the step after the draft is not scored
            distribution = distribution[:, [*range(count), 0]]
            last = torch.arange(count + 1, device=context.device)[:, None] == count
            distribution = replace(distribution, real=distribution.real & ~last)
        return Scores(distribution, cell_positions(context.block(draft.nodes + 1)))


def start_images(reader: PatchReader, request: PatchRequest) -> Patches:
    """The empty images of a request, with their cell order."""
    noise, batch, event = request.noise, request.batch, reader.head.event
    return Patches(
        request,
        torch.zeros(batch, reader.cells, *event, device=noise.rows.device),
        draw_order(noise, reader.cells),
        request.plan.spans(reader.cells),
        reader.head.kernel.num_steps + 1,
        (0,) * batch,
        noise,
        (False,) * batch,
    )


def draw_order(noise: KeyedNoise, cells: int) -> Tensor:  # (B, L)
    """A permutation per image; keyed by position 0, cells by their index plus 1."""
    start = torch.zeros(len(noise.rows), 1, dtype=torch.int64, device=noise.rows.device)
    return noise.shared_keys(start).uniform(cells)[:, 0].argsort(-1)


def cell_keys(noise: KeyedNoise, cells: Tensor) -> Keys:  # (B, ...) -> keys of that shape
    """The noise keys of each cell's path, equal in plain sampling and in every draft."""
    return Keys(noise.shared_keys(cells.flatten(1) + 1).key.view_as(cells))


def cell_positions(block: CellBlock) -> Tensor:  # (B, M, K)
    """The position that keys the noise of each cell."""
    return block.cells + 1


def fill_latents(context: Patches, draft: Draft) -> Tensor:  # (B, L, C)
    """The latents including all drafted cells."""
    if not draft.nodes:
        return context.latents
    block = context.block(draft.nodes)
    row, node, place = (block.real & draft.mask[..., None]).nonzero(as_tuple=True)
    latents = context.latents.clone()
    latents[row, block.cells[row, node, place]] = draft.tokens[row, node, place, -1]
    return latents


def apply_round(context: Patches, round_: Round) -> Patches:
    """The images with the accepted tokens of a round."""
    latents, step = context.latents.clone(), list(context.step)
    for row, tokens in enumerate(round_.tokens):
        place(latents[row], context.order[row], context.spans[step[row] :], tokens)
        step[row] += len(tokens)
    return replace(context, latents=latents, step=tuple(step), finished=round_.finished)


def place(latents: Tensor, turns: Tensor, spans: Spans, tokens: Sequence[Tensor]) -> None:
    """Write tokens (K, S, C) into an image (L, C) with cell order `turns` (L,)."""
    for (begin, end), token in zip(spans, tokens, strict=False):
        latents[turns[begin:end]] = token[: end - begin, -1]


def _root_and(draft: Draft, context: Patches) -> Tensor:  # (B, N + 1) bool
    """Which positions must be scored."""
    alive = torch.tensor([not done for done in context.finished], device=context.device)
    root = torch.ones(context.batch, 1, dtype=torch.bool, device=context.device)
    return torch.cat((root, draft.mask), 1) & alive[:, None]
