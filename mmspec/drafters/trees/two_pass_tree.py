"""A long trunk, and branches only where the draft model was unsure of it.

SpecASR's two-pass sparse tree (Wei et al. 2025, arXiv 2507.18181).

    first pass    the red circle is on a hill      unsure of "circle"; next best: "square"
    second pass           square is                in step with the trunk at "is"
    copied                          on a hill      nodes of their own: what is before them differs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mmspec.drafters.growth import Sprout
from mmspec.drafters.recycled import Recycled, Trunk, aligned
from mmspec.drafters.trees.forest import Forest
from mmspec.recipe import TREE


@dataclass
class Branch:
    """Another way on from an unsure place of the trunk."""

    row: int
    last: int  # node
    pointer: int  # the place of the trunk that its next token is looked for at


@dataclass(frozen=True)
class TwoPassTree(Recycled):
    """A trunk of `most` tokens, and at most `branches` behind places with less than `theta`.

    A branch begins with the second best token there; all grow together, a forward at a time, until
    a token stands in the trunk at most `window` places from where it is expected: the rest of the
    trunk is copied behind it, unread. A row has at most `nodes`. The rest of a refused trunk is
    recycled as in `Recycled`; `window=None` neither copies nor recycles, `branches=0` is a chain.
    Reconstructed: that a branch ends where it is unsure itself, and the caps.
    """

    branches: int = 4
    nodes: int = 64
    walk: ClassVar[str] = TREE
    stops: ClassVar[bool] = False
    choices: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.branches < 0 or self.nodes < self.most:
            raise ValueError(
                f"branches={self.branches}, nodes={self.nodes}: give 0 branches or more, and room "
                f"for a trunk of {self.most}"
            )

    @property
    def words(self) -> str:
        return f"trunk of at most {self.most}, then {self.branches} branches where unsure"

    def finished(self, forest: Forest, trunks: Sequence[Trunk], budget: int) -> Sprout:
        front = [one for row, trunk in enumerate(trunks) for one in self._forks(forest, row, trunk)]
        while front := self._open(forest, trunks, front, budget):
            front = self._on(forest, front)
        return forest.trees()

    def _forks(self, forest: Forest, row: int, trunk: Trunk) -> list[Branch]:
        """The second best token of every unsure place."""
        made = []
        for place, choice in trunk.unsure[: self.branches]:
            if len(forest.tokens[row]) == self.nodes:
                break
            parent = trunk.nodes[place - 1] if place else -1
            node = forest.add(row, choice.tokens[1], parent)
            made.append(Branch(row, node, place + 1))
        return made

    def _open(
        self, forest: Forest, trunks: Sequence[Trunk], front: Sequence[Branch], budget: int
    ) -> list[Branch]:
        """Branches that go on; one that is in step with its trunk gets the rest of that."""
        left = []
        for branch in front:
            row, trunk = branch.row, trunks[branch.row]
            token = forest.tokens[row][branch.last]
            words = [forest.tokens[row][node] for node in trunk.nodes]
            place = aligned(token, words, branch.pointer, self.window)
            branch.pointer += 1
            room = min(
                self.nodes - len(forest.tokens[row]), budget - 1 - forest.depths[row][branch.last]
            )
            if place is not None:
                for word in words[place + 1 : place + 1 + room]:
                    branch.last = forest.add(row, word, branch.last)
            elif room > 0 and token not in self.ends:
                left.append(branch)
        return left

    def _on(self, forest: Forest, front: Sequence[Branch]) -> list[Branch]:
        """One more token for every branch, out of one forward."""
        wanted: list[list[int]] = [[] for _ in range(forest.context.batch)]
        for branch in front:
            wanted[branch.row].append(branch.last)
        found, left = [iter(row) for row in forest.read(wanted)], []
        for branch in front:
            choice, row = next(found[branch.row]), branch.row
            if choice.confidence < self.theta or len(forest.tokens[row]) == self.nodes:
                continue
            branch.last = forest.add(row, choice.tokens[0], branch.last)
            left.append(branch)
        return left
