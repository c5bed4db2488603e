"""Several draft models speak as one: laws are mixed, and the mixture is what is drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.context import Context
from mmspec.draft import categorical
from mmspec.drafters.grow import DraftModel, News, Nodes
from mmspec.drafters.weighting import Evidence, Fixed, Weighting
from mmspec.laws import Categorical


@dataclass(frozen=True)
class Ensemble:
    """The law q = sum_m w_m q_m over `members` (IbED, Lee et al. 2024; TABED, 2026).

    All members read the same draft. The members' probabilities are mixed, not their logits, and
    the mixture is recorded, so this is exact with every lossless verifier. Greedy drafting takes
    the best token of the mixture of softmax laws. Weights belong to rows. Members run one after
    the other.
    """

    members: tuple[DraftModel, ...]
    weighting: Weighting = field(default_factory=Fixed)

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("an ensemble needs at least one member")

    @property
    def sees(self) -> str:
        return "+".join(member.sees for member in self.members)

    @property
    def backbone(self) -> Any:
        """The draft model that all members are views of, for saving; None where they differ."""
        found = [getattr(member, "backbone", None) for member in self.members]
        return found[0] if all(one is found[0] for one in found) else None

    @property
    def wants(self) -> frozenset[str]:
        empty: frozenset[str] = frozenset()
        return empty.union(*(getattr(member, "wants", ()) for member in self.members))

    def begin(self, context: Context) -> _Choir:
        own = self.weighting.begin(context.batch, len(self.members), context.device)
        members = [member.begin(context) for member in self.members]
        return _Choir(members, own, self.weighting.weights(own))

    def listen(self, context: Context, state: _Choir) -> Categorical:
        parts = zip(self.members, state.members, strict=True)
        state.said = []
        return self._mix(state, [member.listen(context, own) for member, own in parts])

    def say(self, context: Context, state: _Choir, nodes: Nodes) -> Categorical:
        parts = zip(self.members, state.members, strict=True)
        return self._mix(state, [member.say(context, own, nodes) for member, own in parts])

    def keep(self, context: Context, state: _Choir, news: News) -> _Choir:
        parts = zip(self.members, state.members, strict=True)
        members = [member.keep(context, own, news) for member, own in parts]
        if not self.weighting.learns:
            return _Choir(members, state.weighting, state.weights)
        own = self.weighting.observe(state.weighting, evidence(state.said, news))
        return _Choir(members, own, self.weighting.weights(own))

    def _mix(self, state: _Choir, laws: Sequence[Categorical]) -> Categorical:
        said = torch.stack([law.scores for law in laws], -2).log_softmax(-1)
        if self.weighting.learns:
            state.said.append(said)
        return mixture(said, state.weights, laws[0].hard)


@dataclass
class _Choir:
    """The members' states, the weighting's, and the laws the members gave in this round."""

    members: list[Any]
    weighting: Any
    weights: Tensor  # (B, M) of this round
    said: list[Tensor] = field(default_factory=list)  # (B, n, M, V) log-probabilities each


def mixture(log_probs: Tensor, weights: Tensor, hard: bool) -> Categorical:
    """Mix laws (B, n, M, V) by weights (B, M); `hard` keeps the best token of the mixture only."""
    return Categorical((log_probs + weights.log()[:, None, :, None]).logsumexp(-2), hard)


def evidence(said: Sequence[Tensor], news: News) -> list[Evidence]:
    """Per row the members' laws and the target's where the draft's context was kept.

    Those are the places behind the context and behind every kept node that was read: the accepted
    positions and the first rejected one.
    """
    target = Categorical(categorical(news.scores.law).scores).probs
    laws = torch.cat([law.exp() for law in said], 1) if said else None
    rows = []
    for row, read in enumerate(news.read):
        own = [0, *(1 + place for place in read)]
        theirs = [0, *(1 + node for node in news.kept.path[row][: len(read)])]
        if laws is None or not news.kept.tokens[row]:
            own = theirs = []
        none = target.new_zeros(0, 1, target.shape[-1])
        members = none if laws is None else laws[row, own]
        rows.append(Evidence(members, target[row, theirs]))
    return rows
