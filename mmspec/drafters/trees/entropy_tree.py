"""Trees that are deep where the target is certain and wide where it is not (SAGE)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.drafters.draft_model import DraftModel, DraftUpdate, GrownDraft
from mmspec.drafters.shapes import Shape, StaticTree
from mmspec.recipe import TREE
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree


@dataclass(frozen=True)
class EntropyTree(Shape):
    """A tree whose depth and width follow the entropy of the target's last distribution.

    Tong et al. 2026, "SAGE". Entropies of neighbouring tokens are similar, so the distribution that
    ended the previous round predicts how certain the target will be: H / log V between `sure` and
    `unsure` interpolates depth and width between their bounds (`depth[1]` x `width[0]` if certain,
    `depth[0]` x `width[1]` if not). Reconstructed: the paper's formula is not public; all these
    numbers; that width tapers evenly to one path; the mean over a batch, whose rows share a tree;
    the midpoint in the first round. The shape depends on committed tokens only, so proposals of any
    kind keep their guarantees. Raises ValueError for bounds that are not sizes or not in order.
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
                raise ValueError(
                    f"{name}={(low, high)} is not a range; give 1 <= lowest <= highest"
                )
        if self.nodes < self.depth[1] or not 0 <= self.sure < self.unsure <= 1:
            raise ValueError(
                f"nodes={self.nodes}, sure={self.sure}, unsure={self.unsure}: give room for one "
                f"path of {self.depth[1]}, and 0 <= sure < unsure <= 1"
            )

    @property
    def description(self) -> str:
        return f"tree of at most {self.nodes} nodes, deep where certain, else wide"

    @property
    def max_depth(self) -> int:
        return self.depth[1]

    def begin(self) -> float:
        return (self.sure + self.unsure) / 2

    def tree(self, entropy: float) -> Tree:
        """The tree for a relative entropy within [0, 1]."""
        share = min(max((entropy - self.sure) / (self.unsure - self.sure), 0.0), 1.0)
        depth = round(self.depth[1] - (self.depth[1] - self.depth[0]) * share)
        width = round(self.width[0] + (self.width[1] - self.width[0]) * share)
        return build_tapered_tree(depth, width, self.nodes)

    def grow(
        self, model: DraftModel, context: Context, state: Any, entropy: float, kind: Kind
    ) -> GrownDraft:
        return StaticTree(self.tree(entropy)).grow(model, context, state, entropy, kind)

    def observe(self, own: float, update: DraftUpdate) -> float:
        entropy = _last_entropy(update)
        return own if entropy is None else float(entropy)


@lru_cache(maxsize=256)
def build_tapered_tree(depth: int, width: int, nodes: int) -> Tree:
    """Parallel paths, each no longer than the one before; at most `nodes` nodes."""
    while True:
        lengths = [max(depth - depth * path // width, 1) for path in range(width)]
        if sum(lengths) <= nodes:
            break
        width -= 1
    return Tree.from_ranks(
        [(path, *[0] * step) for path in range(width) for step in range(lengths[path])]
    )


def _last_entropy(update: DraftUpdate) -> Tensor | None:  # ()
    """Mean H / log V where the paths of unfinished rows ended; None = no such distribution."""
    distribution, round_ = update.scores.distribution, update.round
    if not isinstance(distribution, Categorical):
        return None
    rows = [row for row, finished in enumerate(round_.finished) if not finished]
    if not rows:
        return None
    ends = [round_.path[row][-1] + 1 if round_.path[row] else 0 for row in rows]
    # from the scores: the point mass of greedy decoding has no entropy
    soft = Categorical(distribution.scores[rows, ends].float())
    return soft.entropy().mean() / math.log(distribution.size)
