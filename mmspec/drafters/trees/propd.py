"""The size of a dynamic tree, chosen from measured times and acceptance while decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar

from torch import Tensor

from mmspec.draft import Kind
from mmspec.drafters.draft_model import DraftModel, DraftUpdate, GrownDraft
from mmspec.drafters.shapes import Shape
from mmspec.drafters.trees.auto_tree import LinearTimings
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.errors import check_number
from mmspec.recipe import TREE
from mmspec.targets.tokens.context import Context

_SHARES = (1.0, 0.5, 0.25, 1.0, 0.5, 0.25)  # of the largest size, in the first rounds
_PROBE_PERIOD = 64  # in one round of so many the largest tree is drafted
_DECAY = 0.98


@dataclass
class SizeStatistics:
    """Acceptance of the best, second, ... node of a tree, and seconds by its size."""

    accepted: list[float]
    observed: list[float]
    verify: LinearTimings = field(default_factory=LinearTimings)
    draft: float = 0.0  # seconds, smoothed
    nodes: int = 0  # of the next tree
    rounds: int = 0
    batch: int = 0
    order: Tensor | None = None  # (B, N) place of each node of this round, the best 0

    def copy(self) -> SizeStatistics:
        """The statistics of the next request."""
        own = replace(self, accepted=[*self.accepted], observed=[*self.observed], order=None)
        own.verify = self.verify.copy()
        return own

    def rates(self) -> list[float]:
        """How often the best, second, ... node is accepted; fewer observations count as fewer."""
        pairs = zip(self.accepted, self.observed, strict=True)
        return [accepted / (observed + 1) for accepted, observed in pairs]


@dataclass(eq=False)
class ProPD(Shape):
    """A dynamic tree of the size with the most expected tokens per second (Zhong et al. 2024).

    The nodes of `DynamicTree` are ordered by the probability of their paths; how often the i-th
    best is accepted is counted, and the seconds of a round are a line over its nodes, fitted to the
    last rounds. Up to `nodes`, `least` at least. `statistics` persist across requests. Raises
    ValueError for sizes below 1. Of ProPD this is the tree generation: its early pruning drops
    nodes between two layers of the target, which no public forward can.
    """

    nodes: int = 32
    depth: int = 5
    beam: int = 8
    least: int = 4
    statistics: SizeStatistics = field(init=False, repr=False)
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    walk: ClassVar[str] = TREE

    def __post_init__(self) -> None:
        self.tree = DynamicTree(self.depth, self.beam, self.nodes)
        check_number("least", self.least, 1, self.nodes, whole=True, example=4)
        zeros = [0.0] * self.nodes
        self.statistics = SizeStatistics(zeros, list(zeros), nodes=self.nodes)

    @property
    def description(self) -> str:
        return f"dynamic tree of at most {self.nodes} nodes, sized by measured times"

    @property
    def max_depth(self) -> int:
        return self.depth

    def begin(self) -> SizeStatistics:
        return self.statistics.copy()

    def grow(
        self,
        model: DraftModel,
        context: Context,
        state: Any,
        statistics: SizeStatistics,
        kind: Kind,
    ) -> GrownDraft:
        tree = replace(self.tree, nodes=statistics.nodes)
        grown = tree.grow(model, context, state, None, kind)
        statistics.order = rank_nodes(grown)
        return grown

    def observe(self, statistics: SizeStatistics, update: DraftUpdate) -> SizeStatistics:
        if statistics.order is not None:
            _record_acceptance(statistics, update)
            _record_times(statistics, update)
        statistics.rounds += 1
        statistics.nodes = self._next_size(statistics)
        self.statistics = statistics
        return statistics

    def _next_size(self, statistics: SizeStatistics) -> int:
        if statistics.rounds < len(_SHARES):
            return max(int(_SHARES[statistics.rounds] * self.nodes), self.least)
        if statistics.rounds % _PROBE_PERIOD == 0 or not statistics.verify:
            return self.nodes
        return choose_size(
            statistics.rates(), statistics.draft, statistics.verify.line(), self.least
        )


def choose_size(
    rates: Sequence[float], draft: float, line: tuple[float, float], least: int = 1
) -> int:
    """The nodes with the most expected tokens per second.

    `rates` are those of the best, second, ... node, and a round of n nodes takes `draft` +
    `line[0]` + n `line[1]` seconds.
    """
    tokens = [1 + expected for expected in accumulate(rates)]
    seconds = (draft + line[0] + line[1] * (node + 1) for node in range(len(rates)))
    speeds = [count / max(spent, 1e-9) for count, spent in zip(tokens, seconds, strict=True)]
    return 1 + max(range(least - 1, len(rates)), key=speeds.__getitem__)


def rank_nodes(grown: GrownDraft) -> Tensor | None:  # (B, N)
    """The place of each node in the order of the probability of its path; the best is 0."""
    own = grown.token_probs()
    if own is None:
        return None
    log_q = own.float().clamp_min(1e-30).log()
    path = (grown.draft.reach[:, 1:] * log_q[:, None]).sum(-1)
    order = path.sort(dim=1, descending=True, stable=True).indices
    return order.argsort(dim=1)


def _record_acceptance(statistics: SizeStatistics, update: DraftUpdate) -> None:
    assert statistics.order is not None
    turn = update.round
    for places, path, ended in zip(
        statistics.order.tolist(), turn.path, turn.finished, strict=True
    ):
        if ended:  # cut by a stop
            continue
        for place in range(len(places)):
            statistics.observed[place] = _DECAY * statistics.observed[place] + 1
            statistics.accepted[place] *= _DECAY
        for node in path:
            statistics.accepted[places[node]] += 1


def _record_times(statistics: SizeStatistics, update: DraftUpdate) -> None:
    seconds, size = update.round.seconds, update.draft.nodes
    if statistics.batch != update.draft.batch:  # timings hold for one batch size
        statistics.batch, statistics.verify = update.draft.batch, LinearTimings()
    if seconds:
        statistics.verify.add(size, seconds.get("verify", 0.0) + seconds.get("host", 0.0))
        spent = seconds.get("draft", 0.0)
        statistics.draft = 0.9 * statistics.draft + 0.1 * spent if statistics.draft else spent
