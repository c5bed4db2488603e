"""Trees that are deep where the target is sure and wide where it is not (SAGE)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.drafters.growth import DraftModel, News, Shape, Sprout, StaticTree
from mmspec.recipe import TREE
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree


@dataclass(frozen=True)
class EntropyTree(Shape):
    """A tree whose depth and width follow the entropy of the target's last distribution.

    Tong et al. 2026, "SAGE". Entropies of neighbouring tokens are alike, so the distribution that
    ended the round before says how sure the target will be: H / log V between `sure` and `unsure`
    moves depth and width between their ends (`depth[1]` x `width[0]` if sure, `depth[0]` x
    `width[1]` if not). Reconstructed: the paper's formula is not public; all these numbers; that
    width tapers evenly to one path; the mean over a batch, whose rows share a tree; half-way in the
    first round. The shape depends on committed tokens only, so proposals of any kind stay what they
    are. Raises ValueError for ends that are no sizes or stand the wrong way round.
    """

    depth: tuple[int, int] = (2, 8)
    width: tuple[int, int] = (1, 8)
    nodes: int = 32
    sure: float = 0.05
    unsure: float = 0.4
    kinds: tuple[Kind, ...] = StaticTree.kinds
    walk: ClassVar[str] = TREE

    def __post_init__(self) -> None:
        for name in ("depth", "width"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name}={(low, high)} are no ends; give 1 <= lowest <= highest")
        if self.nodes < self.depth[1] or not 0 <= self.sure < self.unsure <= 1:
            raise ValueError(
                f"nodes={self.nodes}, sure={self.sure}, unsure={self.unsure}: give room for one "
                f"path of {self.depth[1]}, and 0 <= sure < unsure <= 1"
            )

    @property
    def words(self) -> str:
        return f"tree of at most {self.nodes} nodes, deep where sure and wide where not"

    @property
    def longest(self) -> int:
        return self.depth[1]

    def begin(self) -> float:
        return (self.sure + self.unsure) / 2

    def tree(self, entropy: float) -> Tree:
        """The tree for a relative entropy within [0, 1]."""
        share = min(max((entropy - self.sure) / (self.unsure - self.sure), 0.0), 1.0)
        deep = round(self.depth[1] - (self.depth[1] - self.depth[0]) * share)
        wide = round(self.width[0] + (self.width[1] - self.width[0]) * share)
        return tapered(deep, wide, self.nodes)

    def grow(
        self, model: DraftModel, context: Context, state: Any, own: float, kind: Kind
    ) -> Sprout:
        return StaticTree(self.tree(own)).grow(model, context, state, own, kind)

    def observe(self, own: float, news: News) -> float:
        entropy = _last_entropy(news)
        return own if entropy is None else float(entropy)


@lru_cache(maxsize=256)
def tapered(depth: int, width: int, nodes: int) -> Tree:
    """Paths side by side from the context, the later ones the shorter; at most so many nodes."""
    while True:
        lengths = [max(depth - depth * path // width, 1) for path in range(width)]
        if sum(lengths) <= nodes:
            break
        width -= 1
    return Tree.of_ranks(
        [(path, *[0] * step) for path in range(width) for step in range(lengths[path])]
    )


def _last_entropy(news: News) -> Tensor | None:  # ()
    """Mean over the rows that go on of H / log V where their paths ended; None = no such distribution."""
    distribution, kept = news.scores.distribution, news.kept
    if not isinstance(distribution, Categorical):
        return None
    rows = [row for row, finished in enumerate(kept.finished) if not finished]
    if not rows:
        return None
    ends = [kept.path[row][-1] + 1 if kept.path[row] else 0 for row in rows]
    # by the scores: the point mass of greedy decoding has no entropy
    soft = Categorical(distribution.scores[rows, ends].float())
    return soft.entropy().mean() / math.log(distribution.size)
