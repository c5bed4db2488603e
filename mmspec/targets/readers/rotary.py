"""Rotary positions of a prompt's next token, and the lengths at which frequencies change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class RopeBorder:
    """The length at which rotary frequencies change, for all tokens of a forward.

    Beyond it `longrope` switches its frequencies once, and `dynamic` at every length. A draft
    across it would change the keys of the tokens before as well.
    """

    kind: str
    length: int

    @classmethod
    def from_config(cls, config: Any) -> RopeBorder | None:
        """The limit of a text configuration, whose layer kinds may have separate parameters."""
        given = getattr(config, "rope_parameters", None) or {}
        for kind in [given] if "rope_type" in given else [kind for kind in given.values() if kind]:
            if kind["rope_type"] == "longrope":
                return cls("longrope", int(kind["original_max_position_embeddings"]))
            if kind["rope_type"] == "dynamic":
                return cls("dynamic", int(config.max_position_embeddings))
        return None

    def check(self, prompt: int, max_new_tokens: int) -> None:
        """Refuse a request whose new tokens cross the limit. Raises ValueError."""
        if prompt + max_new_tokens - 1 <= self.length:  # the last token is not read
            return
        if prompt <= self.length:
            raise ValueError(
                f"{self.kind!r} positions change after {self.length} tokens; a prompt of {prompt} "
                f"and max_new_tokens={max_new_tokens} cross that, and a draft would change the "
                f"tokens before it; give at most {self.length - prompt + 1}, or use "
                "model.generate()"
            )
        if self.kind == "dynamic":
            raise ValueError(
                f"'dynamic' positions change with every token after {self.length}, and the prompt "
                f"has {prompt}; shorten it, or use model.generate()"
            )


@dataclass(frozen=True, eq=False)
class PositionTable:
    """Position ids of the tokens after a prompt, where these do not count on: cells of a grid.

    The tokens after the last of the table repeat its position.
    """

    ids: Tensor  # (axes, B, T)
    first: Tensor  # (B, 1) the rotary position of the first token, as `Memory.rope` counts

    def look_up(self, positions: Tensor) -> Tensor:  # (1 or B, q) -> (axes, B, q)
        """The position ids of tokens that `Memory` counts as `positions`."""
        axes, batch, length = self.ids.shape
        index = (positions - self.first).clamp(0, length - 1).expand(batch, -1)
        return self.ids.gather(2, index.expand(axes, -1, -1))

    def select(self, rows: Any) -> PositionTable:
        """The table of some rows: a slice, or their indices."""
        return PositionTable(self.ids[:, rows], self.first[rows])

    @staticmethod
    def concatenate(tables: Sequence[PositionTable]) -> PositionTable:
        """The table of the rows of all."""
        length = max(table.ids.shape[2] for table in tables)
        ids = [
            functional.pad(table.ids.double(), (0, length - table.ids.shape[2]), mode="replicate")
            for table in tables
        ]
        return PositionTable(torch.cat(ids, 1).long(), torch.cat([table.first for table in tables]))


def next_rope_positions(
    position_ids: Tensor | None, batch: int, length: int
) -> tuple[list[int], Tensor | None, int]:
    """Rotary position of the first token after the prompt per row, axis offsets, number of axes.

    As in `generate()` every axis continues from the last column, even if earlier values are higher:
    the frames of a long video exceed the text after it. The offsets (axes, B, 1) are None if all
    axes agree, hence if a prompt ends on text.
    """
    if position_ids is None:
        return [length] * batch, None, 0
    last = position_ids[..., -1]
    if position_ids.dim() == 2:
        return [int(value) + 1 for value in last.expand(batch).tolist()], None, 1
    axes = (last[1:] if len(last) > 3 else last).expand(
        -1, batch
    )  # the first of four is text order
    rope = [int(value) + 1 for value in axes[0].tolist()]
    offsets = axes - axes[:1]
    return rope, offsets[..., None] if bool(offsets.any()) else None, len(axes)
