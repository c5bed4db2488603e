"""Drafts that grow node by node, with a topology per row, and are read one column block at a time.

    row 0   a - b - c        columns read    (a) (b, e) (c, f)
    row 1   d - e - f                        (d) (e, -) (f, -)

A forward of the draft model reads one or several nodes per row; a row with fewer nodes is padded
with columns that no node attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import DraftModel, DraftNodes, GrownDraft, Layout
from mmspec.drafters.trees.draws import draw, ranking
from mmspec.targets.tokens.context import Context


class NextTokens(NamedTuple):
    """The draft model's candidates for the token after a node."""

    tokens: tuple[int, ...]  # most probable first
    confidence: float  # probability of the most probable
    log_probs: tuple[float, ...]  # of the tokens, with the target's noise for RACE


class Forest:
    """Nodes of every row: token, parent (-1 = the context), and index of the column read."""

    def __init__(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, count: int
    ) -> None:
        self.model, self.context, self.state = model, context, state
        self.kind, self.count = kind, count  # candidates per node
        self.tokens: list[list[int]] = [[] for _ in range(context.batch)]
        self.parents: list[list[int]] = [[] for _ in range(context.batch)]
        self.depths: list[list[int]] = [[] for _ in range(context.batch)]
        self.columns_read: list[list[int]] = [[] for _ in range(context.batch)]
        self.blocks: list[Tensor] = []  # (B, n) tokens read, in order
        self.distributions: list[Categorical] = []
        self.num_columns = 0

    def add(self, row: int, token: int, parent: int) -> int:
        """Add an unread node; returns its index."""
        self.tokens[row].append(token)
        self.parents[row].append(parent)
        self.depths[row].append(0 if parent < 0 else self.depths[row][parent] + 1)
        self.columns_read[row].append(-1)
        return len(self.tokens[row]) - 1

    def cut(self, row: int, count: int) -> None:
        """Remove the last `count` nodes of a row."""
        for values in (self.tokens, self.parents, self.depths, self.columns_read):
            del values[row][len(values[row]) - count :]

    def root(self) -> list[NextTokens]:
        """Candidates for the token after the context, per row."""
        distribution = self.model.predict_first(self.context, self.state)
        return [row[0] for row in self._next_tokens(distribution, self.context.position())]

    def read(self, nodes_per_row: Sequence[Sequence[int]]) -> list[list[NextTokens]]:
        """Read new nodes of each row in one forward; returns the candidates after each of them."""
        width, device = max(map(len, nodes_per_row)), self.context.device
        depths, tokens = (
            self._gather_values(nodes_per_row, values, width)
            for values in (self.depths, self.tokens)
        )
        for row, nodes in enumerate(nodes_per_row):
            for at, node in enumerate(nodes):
                self.columns_read[row][node] = self.num_columns + at
        visible_rows = [
            self._visible_columns(
                row, nodes[at] if at < len(nodes) else -1, self.num_columns + at, width
            )
            for row, nodes in enumerate(nodes_per_row)
            for at in range(width)
        ]
        visible = torch.tensor(visible_rows, device=device).view(len(nodes_per_row), width, -1)
        block, depth_tensor = (
            torch.tensor(tokens, device=device),
            torch.tensor(depths, device=device),
        )
        nodes_read = DraftNodes(block, Layout(depth_tensor, visible), tuple(self.blocks))
        distribution = self.model.predict(self.context, self.state, nodes_read)
        self.blocks.append(block)
        self.num_columns += width
        return self._next_tokens(distribution, self.context.position() + depth_tensor + 1)

    def chains(self) -> GrownDraft:
        """Build the draft of rows that never branched."""
        tokens, mask = self._pad_rows()
        draft = Draft.chain(tokens, self.kind, mask=mask)
        return GrownDraft(draft, self._all_columns(tokens.shape[1]), self.distributions)

    def keep(self, selected: Sequence[Sequence[int]]) -> None:
        """Propose only these nodes of each row; parents come before their children."""
        for row, nodes in enumerate(selected):
            index = {node: place for place, node in enumerate(nodes)} | {-1: -1}
            self.parents[row] = [index[self.parents[row][node]] for node in nodes]
            for values in (self.tokens, self.depths, self.columns_read):
                values[row] = [values[row][node] for node in nodes]

    def trees(self) -> GrownDraft:
        """Build the draft, with a tree per row."""
        tokens, mask = self._pad_rows()
        width = tokens.shape[1]
        rows = [self._fill_row(row, width, -1) for row in self.parents]
        parents = torch.tensor(rows, device=tokens.device)
        draft = Draft(tokens, parents, mask, self.kind)
        return GrownDraft(draft, self._all_columns(width), self.distributions)

    def _pad_rows(self) -> tuple[Tensor, Tensor]:  # (B, N) each
        width, device = max(map(len, self.tokens)), self.context.device
        # the target reads the padding too; a token of the text is always readable
        last = [text[-1] for text in self.context.history]
        rows = [self._fill_row(row, width, end) for row, end in zip(self.tokens, last, strict=True)]
        sizes = torch.tensor([[len(row)] for row in self.tokens], device=device)
        return torch.tensor(rows, device=device), torch.arange(width, device=device) < sizes

    def _all_columns(self, width: int) -> list[list[int]]:
        return [self._fill_row(row, width, -1) for row in self.columns_read]

    def _gather_values(
        self, nodes_per_row: Sequence[Sequence[int]], values: Sequence[Sequence[int]], width: int
    ) -> list[list[int]]:
        """Values of the given nodes, padded to `width`."""
        pairs = zip(nodes_per_row, values, strict=True)
        return [self._fill_row([own[node] for node in row], width, 0) for row, own in pairs]

    def _visible_columns(self, row: int, node: int, own: int, width: int) -> list[bool]:
        """The columns that a node attends to: its ancestors and its `own`; of -1, `own` alone."""
        num_columns = [False] * (self.num_columns + width)
        num_columns[own] = True
        while node >= 0:
            num_columns[self.columns_read[row][node]] = True
            node = self.parents[row][node]
        return num_columns

    def _next_tokens(self, distribution: Categorical, position: Tensor) -> list[list[NextTokens]]:
        """The candidates of each distribution; `position` (B, n) is that of the tokens."""
        self.distributions.append(distribution)
        index = torch.arange(distribution.batch[1], device=self.context.device)
        tokens = draw(distribution, self.count, self.kind, self.context.noise, position, index)
        # from the scores: a point mass would make a greedy drafter always certain
        sure = distribution.scores.float().softmax(-1).amax(-1)
        weights = ranking(distribution, self.kind, self.context.noise, position).gather(-1, tokens)
        read = torch.cat((tokens.to(weights.dtype), weights, sure[..., None]), -1).tolist()
        return [[self._next_tokens_of(values) for values in row] for row in read]

    def _next_tokens_of(self, values: Sequence[float]) -> NextTokens:
        tokens, weights = values[: self.count], values[self.count : -1]
        return NextTokens(tuple(map(int, tokens)), values[-1], tuple(weights))

    @staticmethod
    def _fill_row(row: Sequence[int], width: int, value: int) -> list[int]:
        return [*row, *([value] * (width - len(row)))]
