"""DySpec: a tree of sampled draws, those that are most likely to be tested."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane
from mmspec.draft import Kind
from mmspec.drafters.trees.level_tree import Children, Front, LevelTree, Ranking
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class DySpec(LevelTree):
    """Draw the `nodes` children that are most likely to be tested (Xiong et al. 2024, algorithm 1).

    Where q is right about acceptance, the draws x1, x2, ... without replacement below a node of
    path probability v are tested with probability v, v (1 - q(x1)), v (1 - q(x1) - q(x2)), ..., and
    the path of x1 has probability v q(x1). None of these values depends on the token that is drawn
    with it, and all that depend on the token are below it, so the draws that are kept are decided
    before they are made: WOR proposals, exact with recursive rejection. To keep the most probable
    tokens in place of draws would not be.

    One forward reads the `beam` most probable nodes of a level, and `beam` children of each are
    drawn; with sizes that do not bind, the tree is that of algorithm 1, which reads nodes one by
    one. `threshold` is that of algorithm 2: a draw is made where it is tested with more than this
    probability. Greedy decoding draws the likeliest tokens. Raises ValueError for invalid sizes.
    """

    depth: int = 6
    beam: int = 8
    nodes: int = 24
    threshold: float = 0.0
    kinds: tuple[Kind, ...] = (Kind.WOR,)

    @property
    def description(self) -> str:
        return f"{self.nodes} draws that are likely to be tested"

    def begin_ranking(
        self, distribution: Categorical, context: Context, kind: Kind, depth: int
    ) -> Ranking:
        count = min(self.beam, distribution.size)

        def rank(distribution: Categorical, front: Front) -> Children:
            log_q = distribution.scores.float().log_softmax(-1)
            ranked = log_q
            if not distribution.hard:
                index = torch.arange(log_q.shape[1], device=log_q.device)
                index = index + front.level * self.beam
                noise = context.noise.fresh_keys(Lane.DRAFT, index).gumbel(distribution.size)
                ranked = log_q + noise
            tokens = ranked.topk(count, -1).indices
            own = log_q.gather(-1, tokens)
            drawn = own.exp()
            left = (1 - (drawn.cumsum(-1) - drawn)).clamp_min(0)  # before each draw
            tested = torch.maximum(left.log(), own)  # rounding: never below what is drawn
            path = front.log_q[..., None]
            return Children(tokens, path + own, path + tested, path + own)

        return rank
