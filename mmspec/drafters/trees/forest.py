"""Drafts that grow node by node, every row in its own way, and are read a column at a time.

    row 0   a - b - c        columns read    (a) (b, e) (c, f)
    row 1   d - e - f                        (d) (e, -) (f, -)

A forward of the draft model reads one or several nodes per row; a row with fewer repeats one that
nobody sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.growth import DraftModel, Layout, Nodes, Sprout
from mmspec.drafters.trees.draws import draw, ranking
from mmspec.targets.tokens.context import Context


class NextTokens(NamedTuple):
    """What the draft model would say behind a node."""

    tokens: tuple[int, ...]  # the likeliest first
    confidence: float  # its probability of the likeliest
    log_probs: tuple[float, ...]  # of the tokens, with the target's noise where that ranks them


class Forest:
    """Nodes of every row: token, parent (-1 = the context) and place among the columns read."""

    def __init__(
        self, model: DraftModel, context: Context, state: Any, kind: Kind, count: int
    ) -> None:
        self.model, self.context, self.state = model, context, state
        self.kind, self.count = kind, count  # how many tokens a choice has
        self.tokens: list[list[int]] = [[] for _ in range(context.batch)]
        self.parents: list[list[int]] = [[] for _ in range(context.batch)]
        self.depths: list[list[int]] = [[] for _ in range(context.batch)]
        self.places: list[list[int]] = [[] for _ in range(context.batch)]
        self.blocks: list[Tensor] = []  # (B, n) tokens read, in order
        self.distributions: list[Categorical] = []
        self.columns = 0

    def add(self, row: int, token: int, parent: int) -> int:
        """A new node, not read yet; returns its index."""
        self.tokens[row].append(token)
        self.parents[row].append(parent)
        self.depths[row].append(0 if parent < 0 else self.depths[row][parent] + 1)
        self.places[row].append(-1)
        return len(self.tokens[row]) - 1

    def cut(self, row: int, count: int) -> None:
        """Propose the last `count` nodes of a row after all not."""
        for values in (self.tokens, self.parents, self.depths, self.places):
            del values[row][len(values[row]) - count :]

    def root(self) -> list[NextTokens]:
        """What comes behind the context, per row."""
        distribution = self.model.predict_first(self.context, self.state)
        return [row[0] for row in self._choices(distribution, self.context.position())]

    def read(self, wanted: Sequence[Sequence[int]]) -> list[list[NextTokens]]:
        """One forward over new nodes per row; what comes behind each of them."""
        width, device = max(map(len, wanted)), self.context.device
        depths, tokens = (self._of(wanted, values, width) for values in (self.depths, self.tokens))
        for row, nodes in enumerate(wanted):
            for at, node in enumerate(nodes):
                self.places[row][node] = self.columns + at
        seen = [
            self._seen(row, nodes[at] if at < len(nodes) else -1, self.columns + at, width)
            for row, nodes in enumerate(wanted)
            for at in range(width)
        ]
        visible = torch.tensor(seen, device=device).view(len(wanted), width, -1)
        block, deep = torch.tensor(tokens, device=device), torch.tensor(depths, device=device)
        nodes_read = Nodes(block, Layout(deep, visible), tuple(self.blocks))
        distribution = self.model.predict(self.context, self.state, nodes_read)
        self.blocks.append(block)
        self.columns += width
        return self._choices(distribution, self.context.position() + deep + 1)

    def chains(self) -> Sprout:
        """The nodes as chains, for rows that never branched."""
        tokens, mask = self._padded()
        draft = Draft.chain(tokens, self.kind, mask=mask)
        return Sprout(draft, self._all_places(tokens.shape[1]), self.distributions)

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        """Propose these nodes of each row alone; parents come before their children."""
        for row, nodes in enumerate(chosen):
            index = {node: place for place, node in enumerate(nodes)} | {-1: -1}
            self.parents[row] = [index[self.parents[row][node]] for node in nodes]
            for values in (self.tokens, self.depths, self.places):
                values[row] = [values[row][node] for node in nodes]

    def trees(self) -> Sprout:
        """The nodes as trees, of every row its own."""
        tokens, mask = self._padded()
        width = tokens.shape[1]
        rows = [self._filled(row, width, -1) for row in self.parents]
        parents = torch.tensor(rows, device=tokens.device)
        draft = Draft(tokens, parents, mask, self.kind)
        return Sprout(draft, self._all_places(width), self.distributions)

    def _padded(self) -> tuple[Tensor, Tensor]:  # (B, N) each
        width, device = max(map(len, self.tokens)), self.context.device
        # the target reads the filling too, and a token of the text is one it can read
        last = [text[-1] for text in self.context.history]
        rows = [self._filled(row, width, end) for row, end in zip(self.tokens, last, strict=True)]
        sizes = torch.tensor([[len(row)] for row in self.tokens], device=device)
        return torch.tensor(rows, device=device), torch.arange(width, device=device) < sizes

    def _all_places(self, width: int) -> list[list[int]]:
        return [self._filled(row, width, -1) for row in self.places]

    def _of(
        self, wanted: Sequence[Sequence[int]], values: Sequence[Sequence[int]], width: int
    ) -> list[list[int]]:
        """Values of the nodes wanted, filled up."""
        pairs = zip(wanted, values, strict=True)
        return [self._filled([own[node] for node in row], width, 0) for row, own in pairs]

    def _seen(self, row: int, node: int, own: int, width: int) -> list[bool]:
        """Which columns a node sees: what it hangs from, and its `own`; of -1, that alone."""
        columns = [False] * (self.columns + width)
        columns[own] = True
        while node >= 0:
            columns[self.places[row][node]] = True
            node = self.parents[row][node]
        return columns

    def _choices(self, distribution: Categorical, position: Tensor) -> list[list[NextTokens]]:
        """What each distribution chooses; `position` (B, n) is that of the tokens."""
        self.distributions.append(distribution)
        index = torch.arange(distribution.batch[1], device=self.context.device)
        tokens = draw(distribution, self.count, self.kind, self.context.noise, position, index)
        # by the scores: a point mass would make a greedy drafter always sure
        sure = distribution.scores.float().softmax(-1).amax(-1)
        weights = ranking(distribution, self.kind, self.context.noise, position).gather(-1, tokens)
        read = torch.cat((tokens.double(), weights.double(), sure.double()[..., None]), -1).tolist()
        return [[self._choice(values) for values in row] for row in read]

    def _choice(self, values: Sequence[float]) -> NextTokens:
        tokens, weights = values[: self.count], values[self.count : -1]
        return NextTokens(tuple(map(int, tokens)), values[-1], tuple(weights))

    @staticmethod
    def _filled(row: Sequence[int], width: int, value: int) -> list[int]:
        return [*row, *([value] * (width - len(row)))]
