"""Prompts as inputs of a compiled graph: padded to one of a few lengths, with masks and a cache.

slot     0  1  2  3  4  5  6  7      row 1 has left padding of its own
row 0    a  b  c  d  e  .  .  .      . = padding of the graph, which no token attends to
row 1    p  p  f  g  h  .  .  .
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmspec.targets.fixed import pad, round_power

STEP = 16  # slots between lengths up to 128; longer ones are eighths of a power of two apart
SLIDING = "sliding_attention"


def round_prompt(length: int) -> int:
    """The length that a prompt is padded to."""
    step = max(STEP, round_power(length) // 8)
    return -(-length // step) * step


@dataclass(frozen=True)
class PromptTensors:
    """The inputs of a prompt's forward: B rows, L slots."""

    carriers: tuple[Tensor, ...]  # (B, L, ...) each: token ids, embeddings
    positions: Tensor  # (1 or B, L), or (axes, 1 or B, L)
    visible: Tensor | None = None  # (B, L) 0 = padding
    masks: Mapping[str, Tensor] = field(default_factory=dict)  # (1 or B, 1, L, L) by kind of layer
    names: tuple[str, ...] = ()  # of the last carriers, where they are optional

    @property
    def batch(self) -> int:
        return self.carriers[0].shape[0]

    @property
    def length(self) -> int:
        return self.carriers[0].shape[1]

    @property
    def rows(self) -> int:
        return round_power(self.batch)

    @property
    def key(self) -> tuple[Any, ...]:
        """Prompts of one key are read by one graph."""
        axes = len(self.positions) if self.positions.dim() == 3 else 0
        return self.rows, self.carriers[0].dim(), axes, *sorted(self.masks), *self.names

    def find_real_slots(self) -> Tensor | None:  # (B, L) bool
        """Slots that are not padding, None = all; with masks, those that see themselves."""
        if not self.masks:
            return None if self.visible is None else self.visible != 0
        own = next(iter(self.masks.values()))[:, 0].diagonal(dim1=1, dim2=2)
        return own.expand(self.batch, -1) == (True if own.dtype == torch.bool else 0)

    def place(self, parts: Sequence[Tensor]) -> tuple[Any, ...]:
        """The inputs of a graph: positions, carriers, hidden (R, L'), masks and parts, padded."""
        rows, length, dtype = self.rows, round_prompt(self.length), parts[0].dtype
        hide = torch.finfo(dtype).min
        carriers = [pad(one, (rows, length, *one.shape[2:])) for one in self.carriers]
        spread = self.positions.expand(*self.positions.shape[:-2], self.batch, -1)
        positions = pad(spread, (*spread.shape[:-2], rows, length))
        hidden = torch.zeros(rows, length, dtype=dtype, device=positions.device)
        if self.visible is not None:
            hidden[: self.batch, : self.length] = (self.visible == 0) * hide
        masks = []
        for kind in sorted(self.masks):
            own = self.masks[kind].expand(self.batch, -1, -1, -1)
            if own.dtype == torch.bool:
                own = torch.where(own, 0.0, hide)
            masks.append(pad(own.to(dtype), (rows, 1, length, length), hide))
        return positions, carriers, hidden, masks, parts


def make_masks(
    hidden: Tensor, kinds: Sequence[str], window: int | None
) -> dict[str, Tensor]:  # (R, 1, L, L) each
    """Causal masks of a padded prompt by kind of layer, from the bias (R, L) of padding."""
    hide = torch.finfo(hidden.dtype).min
    slots = torch.arange(hidden.shape[1], device=hidden.device)
    later = slots > slots[:, None]  # (L, L)
    mask = hidden[:, None, None].masked_fill(later, hide)
    made = dict.fromkeys(kinds, mask)
    if window is not None:
        made[SLIDING] = mask.masked_fill(slots <= slots[:, None] - window, hide)
    return made


class PromptLayer:
    """One layer of a `PromptCache`."""

    is_sliding = is_croppable = False
    is_initialized = is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[:, :, : key_states.shape[2]] = key_states
        self.values[:, :, : key_states.shape[2]] = value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class PromptCache(Cache):
    """The cache of a compiled prompt: writes the first slots of buffers, and reads none."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        layers: Any = [PromptLayer(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        super().__init__(layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[layer_idx]
        written: tuple[Tensor, Tensor] = layer.update(key_states, value_states)
        return written


def symbolic_axes(inputs: tuple[Any, ...]) -> list[tuple[Tensor, int]]:
    """The tensors and axes whose sizes differ between prompts of one graph."""
    positions, carriers, hidden, masks, parts = inputs
    found = [(positions, positions.dim() - 1), *((one, 1) for one in (hidden, *carriers))]
    return [*found, *((one, axis) for one in masks for axis in (2, 3)), *((x, 2) for x in parts)]
