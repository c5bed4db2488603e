"""Dynamic trees: every round and row grows its own topology from the drafter's probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.drafters.trees.draws import draw_noise, perturb_level
from mmspec.drafters.trees.level_tree import Children, Front, LevelTree, Ranking
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class BeamMass:
    """Grow on while the paths of the front have at least log mass `limit` (DDD, Brown et al. 2024).

    Asked after `first` levels, and after every `every` further ones; each time is read from the
    device. Rows of a batch grow alike: the largest mass decides.
    """

    limit: float = -1.0
    first: int = 3
    every: int = 2

    def ends_at(self, levels: int, score: Tensor) -> bool:  # (B, beam) log probabilities of paths
        """Whether a tree of so many levels is deep enough."""
        is_asked = levels >= self.first and (levels - self.first) % self.every == 0
        return is_asked and not bool((score.logsumexp(-1) > self.limit).any())


@dataclass(frozen=True)
class DynamicTree(LevelTree):
    """The tree of EAGLE-2 (Li et al. 2024, section 4).

    Grow the most probable `beam` paths for `depth` levels, then keep the best `nodes` of all
    candidates. Every row has its own topology. `stop` ends it before. Raises ValueError for
    invalid sizes.
    """

    depth: int = 5
    beam: int = 8
    nodes: int = 24
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    stop: BeamMass | None = None

    @property
    def description(self) -> str:
        return f"dynamic tree of {self.nodes} nodes"

    @property
    def fixed_reads(self) -> int | None:
        return super().fixed_reads if self.stop is None else None

    def is_deep_enough(self, levels: int, score: Tensor) -> bool:  # (B, beam)
        return self.stop is not None and self.stop.ends_at(levels, score)

    def begin_ranking(
        self, distribution: Categorical, context: Context, kind: Kind, depth: int
    ) -> Ranking:
        return rank_by_probability(distribution, context, kind, depth, self.beam)


def rank_by_probability(
    distribution: Categorical, context: Context, kind: Kind, depth: int, beam: int
) -> Ranking:
    """Candidates by the probability of their paths, with the target's noise for RACE."""
    noise = draw_noise(distribution, kind, context, depth)
    count = min(beam, distribution.size)

    def rank(distribution: Categorical, front: Front) -> Children:
        scored = perturb_level(distribution, noise, front.level).log_softmax(-1)
        values, tokens = scored.topk(count, -1)
        score = values.float()
        if front.level:
            score = front.log_q[..., None] + score
        return Children(tokens, score, score, score)

    return rank
