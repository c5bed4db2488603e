"""C2T: a small classifier decides which candidates of a dynamic tree are drafted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.drafters.acceptance import AcceptanceHead
from mmspec.drafters.trees.dynamic_tree import rank_by_probability
from mmspec.drafters.trees.level_tree import Children, Front, LevelTree, Ranking
from mmspec.targets.tokens.context import Context

LEAST = -12.0  # nats; less probable paths are all alike to the classifier


def tree_features(
    log_q: Tensor, entropy: Tensor, depth: Tensor | int
) -> Tensor:  # (...) -> (..., 3)
    """Log probability of a node's path, entropy of its own draft distribution, log(1 + depth).

    Both in nats; the children of the context have depth 0.
    """
    place = torch.as_tensor(depth, dtype=log_q.dtype, device=log_q.device).log1p()
    return torch.stack(torch.broadcast_tensors(log_q.clamp_min(LEAST), entropy, place), -1)


class TreeHead(AcceptanceHead):
    """Predicts whether a node is on the accepted path, from `tree_features`: logits (...)."""

    features = 3
    noun = "tree head"
    command = "mmspec train tree"


@dataclass(frozen=True)
class C2T(LevelTree):
    """Draft the candidates that a classifier expects to be accepted (Huo et al. 2025).

    The candidates are those of `DynamicTree`. One is drafted if the classifier expects it, and the
    nodes above it, to be accepted with more than `threshold`; at most `nodes` are, and `beam` of a
    level are read. `head` may be a file of `mmspec train tree`. Nodes are selected by identity, so
    proposals are DET or RACE. Reconstructed: the entropy is that of the distribution that has the
    node's token. Raises ValueError for another head and for invalid sizes.
    """

    head: TreeHead | str | Path
    threshold: float = 0.1
    depth: int = 6
    beam: int = 8
    nodes: int = 24
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "head", TreeHead.read(self.head))

    @property
    def description(self) -> str:
        return f"at most {self.nodes} nodes that a classifier selects"

    def begin_ranking(
        self, distribution: Categorical, context: Context, kind: Kind, depth: int
    ) -> Ranking:
        by_probability = rank_by_probability(distribution, context, kind, depth, self.beam)
        assert isinstance(self.head, TreeHead)
        head = self.head.to(distribution.scores.device)

        @torch.no_grad()
        def rank(distribution: Categorical, front: Front) -> Children:
            found = by_probability(distribution, front)
            entropy = entropy_of(distribution)[..., None]
            score = nn.functional.logsigmoid(head(tree_features(found.log_q, entropy, front.level)))
            score = score.masked_fill(found.log_q == -torch.inf, -torch.inf)
            score = torch.minimum(score, front.score[..., None])
            return Children(found.tokens, score, score, found.log_q)

        return rank


def entropy_of(distribution: Categorical) -> Tensor:  # (...) nats
    """From the scores: a point mass would make a greedy drafter always certain."""
    log_q = distribution.scores.float().log_softmax(-1)
    entropy: Tensor = -torch.special.xlogy(log_q.exp(), log_q.exp()).sum(-1)
    return entropy
