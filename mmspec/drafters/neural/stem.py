"""A draft model that reads a draft which grows, and of which parts are taken back, in one round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmspec.distributions.categorical import Categorical
from mmspec.drafters.draft_model import DraftModel, DraftNodes, Layout
from mmspec.targets.tokens.context import Context

Rows = list[list[int]]  # tokens of a draft, per row


class Stem:
    """What one model has read of a round's draft, a chain per row.

    Rows may differ in length. A token that is taken back keeps its column in the model's cache,
    which nothing attends to any more:

        read a b c     columns  0 1 2
        read a d       columns  0 . . 3      d attends to a and itself
    """

    def __init__(self, model: DraftModel, context: Context, state: Any) -> None:
        self.model, self.context, self.state = model, context, state
        self.tokens: Rows = [[] for _ in context.history]
        self.columns: Rows = [[] for _ in context.history]
        self.blocks: list[torch.Tensor] = []
        self.distributions: list[Categorical] = []
        self.num_columns = 0

    @property
    def is_read(self) -> bool:
        """Whether the model was used in this round."""
        return bool(self.distributions)

    def read(self, rows: Rows) -> None:
        """Read what is new in `rows`, in one forward; what differs from before is taken back."""
        if not self.distributions:
            self.distributions.append(self.model.predict_first(self.context, self.state))
        for known, columns, row in zip(self.tokens, self.columns, rows, strict=True):
            del known[count_equal(known, row) :]
            del columns[len(known) :]
        new = [row[len(known) :] for known, row in zip(self.tokens, rows, strict=True)]
        width = max(map(len, new))
        if not width:
            return
        device, last = self.context.device, [text[-1] for text in self.context.history]
        tokens, depths, visible = [], [], []
        for place, own in enumerate(new):
            first = len(self.columns[place])
            self.tokens[place] += own
            self.columns[place] += range(self.num_columns, self.num_columns + len(own))
            tokens.append([*own, *[last[place]] * (width - len(own))])
            depths.append([*range(first, first + len(own)), *[0] * (width - len(own))])
            visible += [self._see(place, first, at, width) for at in range(width)]
        block = torch.tensor(tokens, device=device)
        seen = torch.tensor(visible, device=device).view(len(rows), width, -1)
        layout = Layout(torch.tensor(depths, device=device), seen)
        nodes = DraftNodes(block, layout, tuple(self.blocks))
        self.distributions.append(self.model.predict(self.context, self.state, nodes))
        self.blocks.append(block)
        self.num_columns += width

    def after(self, starts: Sequence[int], count: int) -> Categorical:  # (B, count)
        """Distributions after the first `starts[b]` tokens of a row and those that follow.

        Past the end of a row the last one is repeated.
        """
        places = []
        for start, columns in zip(starts, self.columns, strict=True):
            known = [0, *(column + 1 for column in columns)]
            places.append([known[min(at, len(known) - 1)] for at in range(start, start + count)])
        index = torch.tensor(places, device=self.context.device)
        rows = torch.arange(len(places), device=index.device)[:, None]
        return Categorical.cat(self.distributions)[rows, index]

    def columns_of(self, rows: Rows, accepted: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Columns of the first `accepted[b]` tokens of `rows`, as far as they were read."""
        found = []
        for known, columns, row, count in zip(
            self.tokens, self.columns, rows, accepted, strict=True
        ):
            found.append(tuple(columns[: count_equal(known, row[:count])]))
        return tuple(found)

    def _see(self, row: int, first: int, at: int, width: int) -> list[bool]:
        """The columns that the new node `at` of a row attends to; padding sees itself."""
        seen = [False] * (self.num_columns + width)
        seen[self.num_columns + at] = True
        if first + at < len(self.columns[row]):
            for column in self.columns[row][: first + at]:
                seen[column] = True
        return seen


def count_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(one), len(other)))
