"""A long trunk, with branches only where the draft model was uncertain.

The two-pass sparse tree of SpecASR (Wei et al. 2025, arXiv 2507.18181).

    first pass    the red circle is on a hill      uncertain about "circle"; second best: "square"
    second pass           square is                aligned with the trunk at "is"
    copied                          on a hill      separate nodes, since their prefix differs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmspec.drafters.draft_model import GrownDraft
from mmspec.drafters.recycling_chain import RecyclingChain, Trunk, find_aligned
from mmspec.drafters.trees.forest import Forest
from mmspec.recipe import TREE


@dataclass
class Branch:
    """An alternative continuation of the trunk."""

    row: int
    last: int  # node
    pointer: int  # position in the trunk where its next token is expected


@dataclass(frozen=True)
class TwoPassTree(RecyclingChain):
    """A trunk of `max_length` tokens, and `branches` after tokens of confidence below `theta`.

    A branch begins with the second best token; all branches grow together, one forward at a time,
    until a token occurs in the trunk at most `window` positions from where it is expected: the rest
    of the trunk is then copied after it, unread. A row has at most `nodes` nodes. The rest of a
    rejected trunk is recycled as in `RecyclingChain`; `window=None` neither copies nor recycles,
    `branches=0` is a chain. Reconstructed: that a branch ends where it is uncertain itself, and the
    caps.
    """

    branches: int = 4
    nodes: int = 64
    walk: ClassVar[str] = TREE
    stops: ClassVar[bool] = False
    num_candidates: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.branches < 0 or self.nodes < self.max_length:
            raise ValueError(
                f"branches={self.branches}, nodes={self.nodes}: give 0 branches or more, and at "
                f"least {self.max_length} nodes, for the trunk"
            )

    @property
    def description(self) -> str:
        return f"trunk of at most {self.max_length}, then {self.branches} branches where uncertain"

    def build_draft(self, forest: Forest, trunks: Sequence[Trunk], budget: int) -> GrownDraft:
        front = [
            one
            for row, trunk in enumerate(trunks)
            for one in self._fork_branches(forest, row, trunk)
        ]
        while front := self._select_open(forest, trunks, front, budget):
            front = self._extend(forest, front)
        return forest.trees()

    def _fork_branches(self, forest: Forest, row: int, trunk: Trunk) -> list[Branch]:
        """Add the second best token at every uncertain position."""
        branches = []
        for place, choice in trunk.unsure[: self.branches]:
            if len(forest.tokens[row]) == self.nodes:
                break
            parent = trunk.nodes[place - 1] if place else -1
            node = forest.add(row, choice.tokens[1], parent)
            branches.append(Branch(row, node, place + 1))
        return branches

    def _select_open(
        self, forest: Forest, trunks: Sequence[Trunk], front: Sequence[Branch], budget: int
    ) -> list[Branch]:
        """Branches that continue; one aligned with its trunk gets the rest of the trunk."""
        open_branches = []
        for branch in front:
            row, trunk = branch.row, trunks[branch.row]
            token = forest.tokens[row][branch.last]
            trunk_tokens = [forest.tokens[row][node] for node in trunk.nodes]
            place = find_aligned(token, trunk_tokens, branch.pointer, self.window)
            branch.pointer += 1
            max_tokens = min(
                self.nodes - len(forest.tokens[row]), budget - 1 - forest.depths[row][branch.last]
            )
            if place is not None:
                for token in trunk_tokens[place + 1 : place + 1 + max_tokens]:
                    branch.last = forest.add(row, token, branch.last)
            elif max_tokens > 0 and token not in self.ends:
                open_branches.append(branch)
        return open_branches

    def _extend(self, forest: Forest, front: Sequence[Branch]) -> list[Branch]:
        """Add one more token to every branch, in one forward."""
        nodes_per_row: list[list[int]] = [[] for _ in range(forest.context.batch)]
        for branch in front:
            nodes_per_row[branch.row].append(branch.last)
        found, open_branches = [iter(row) for row in forest.read(nodes_per_row)], []
        for branch in front:
            choice, row = next(found[branch.row]), branch.row
            if choice.confidence < self.theta or len(forest.tokens[row]) == self.nodes:
                continue
            branch.last = forest.add(row, choice.tokens[0], branch.last)
            open_branches.append(branch)
        return open_branches
