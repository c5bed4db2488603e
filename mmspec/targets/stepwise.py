"""Chains read as the model's own step of several tokens: it makes positions and mask itself.

For classes that take no positions, or do otherwise with a mask than a drafted block needs. Row by
row, since rows that keep different numbers of tokens would need masks of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.targets.memory import Memory, TokenBlock

USES = ("chain", "ragged")  # what may be read so: one row, several


def step(memory: Memory, block: TokenBlock) -> tuple[Tensor, Tensor]:
    """Plan where a chain of one row goes, behind what is kept, as `generate()` would place it.

    Returns position_ids (1, q) and the mask (1, view) of what is no padding.
    """
    start = memory.kept[0] + block.behind
    memory.cache.plan_uniform(start, block.length)
    positions = block.depths + memory.rope[0]
    if memory.last is not None:
        positions = positions.clamp_max(memory.last)
    seen = torch.ones(1, start + block.length, dtype=torch.int64, device=memory.like.device)
    seen[:, : memory.padding[0]] = 0
    return positions, seen
