"""What a draft model sees of the picture: an explicit choice, and the inputs it leads to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.backbone import Backbone
from mmspec.context import Context


@dataclass(frozen=True)
class Nothing:
    """Text only: every placeholder and frame token is taken out of the prompt (SPD-MLLM, Gagrani 2024)."""

    hidden: tuple[int, ...] = ()  # ids to take out
    name: str = "nothing"

    def inputs(self, context: Context, backbone: Backbone) -> Mapping[str, Any]:
        hidden = set(self.hidden)
        rows = [[token for token in row if token not in hidden] for row in prompts(context)]
        return padded(rows, context.device)


@dataclass(frozen=True)
class Placeholders:
    """The prompt as it is, placeholders read as ordinary tokens; no picture."""

    name: str = "placeholders"

    def inputs(self, context: Context, backbone: Backbone) -> Mapping[str, Any]:
        return padded(prompts(context), context.device)


@dataclass(frozen=True)
class Pixels:
    """The whole request, through the draft model's own encoder."""

    name: str = "pixels"

    def inputs(self, context: Context, backbone: Backbone) -> Mapping[str, Any]:
        return {**context.request.inputs, **context.request.drafter_inputs}


def prompts(context: Context) -> list[list[int]]:
    """Prompt tokens per row, without padding."""
    return [row[:length] for row, length in zip(context.history, context.prompt, strict=True)]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Left-pad token rows into `input_ids` and `attention_mask`."""
    width = max(len(row) for row in rows)
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }
