"""A smaller picture, drawn row by row by a model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.codes.grid_mask import GridMask
from mmspec.laws.categorical import Categorical
from mmspec.laws.noise import Lane
from mmspec.laws.sampling import Sampling
from mmspec.targets.context import Context
from mmspec.targets.memory import Block, Memory, block


@dataclass(frozen=True)
class Sketcher:
    """Draws rows of a picture behind given ones, with the target's settings and guidance.

    The prompt is the target's. Given rows are read once and stay in memory; what is drawn here is
    not kept, because it is given back as something else, if only slightly.
    """

    backbone: Any  # a `mmspec.targets.guidance.Guided`

    def begin(self, context: Context, grid: Grid) -> Sketch:
        """Read the prompts."""
        inputs = {**context.request.inputs, **context.request.drafter_inputs}
        memory, logits, _ = self.backbone.prefill(inputs, room=grid.length + 64)
        start = context.position()
        sampling = replace(context.sampling, places=(GridMask(grid, start),))
        return Sketch(grid, sampling, start, memory, logits[:, None], [0] * context.batch)

    def row(self, context: Context, sketch: Sketch, given: Sequence[Sequence[int]]) -> Tensor:
        """The codes (B, w) of one more row, as tokens, behind the picture tokens `given` so far.

        Rows of the batch may stand in different rows of their pictures. One that has nothing new to
        read takes part, and what it says is not to be used.
        """
        logits = self._read(sketch, given)
        memory, device = sketch.memory, context.device
        place = torch.tensor([[len(tokens)] for tokens in given], device=device)
        drawn: list[Tensor] = []
        for step in range(sketch.grid.width):
            if step:
                logits, _ = self.backbone.read(memory, _link(drawn[-1], step - 1, memory.like))
            law = sketch.sampling.law(logits, None, sketch.start + place + step)
            drawn.append(_drawn(law, context, step))
        return torch.cat(drawn, 1)

    def _read(self, sketch: Sketch, given: Sequence[Sequence[int]]) -> Tensor:  # (B, 1, V)
        """Read what is new among the given tokens; logits of the token behind them."""
        pairs = zip(given, sketch.read, strict=True)
        news = [list(tokens[read:]) for tokens, read in pairs]
        if not any(news):
            return sketch.first
        filler = [int(sketch.grid.ids()[0])]  # for rows without news; it is not kept
        layout = block([new or filler for new in news], None, sketch.memory.like)
        logits: Tensor = self.backbone.read(sketch.memory, layout)[0]
        sketch.memory.advance([len(new) for new in news])
        sketch.read = [len(tokens) for tokens in given]
        return logits


@dataclass
class Sketch:
    """One request's small pictures."""

    grid: Grid
    sampling: Sampling
    start: Tensor  # (B, 1) absolute position of their first tokens
    memory: Memory
    first: Tensor  # (B, 1, V) logits behind the prompts
    read: list[int]  # picture tokens in memory, per row


def _drawn(law: Categorical, context: Context, step: int) -> Tensor:  # (B, 1)
    index = torch.tensor([step], device=context.device)
    return law.sample(context.noise.fresh(Lane.DRAFT, index))


def _link(token: Tensor, behind: int, like: Tensor) -> Block:
    """One token behind `behind` others that are read but not kept."""
    depths = torch.full((1, 1), behind, device=token.device)
    return Block(token, depths, like.new_zeros(1, 1, behind + 1), 0, None, behind)
