"""A pool of drafters: one of them drafts in every round, chosen by what was accepted so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.neural.small_model import Autoregressive, SmallModel
from mmspec.drafters.selectors import ArmCounts, Selector
from mmspec.targets.tokens.context import Context


class DrafterPool(Drafter):
    """Chooses among `arms` by `selector` (BanditSpec, MetaSD, Not-a-Bandit).

    The reward of an arm is the share of the tokens of a round that it drafted, up to `longest`
    tokens. With a selector that sees all, every arm proposes in every round, and its reward is the
    part of the committed tokens that its draft has: no further calls of the target, but forwards of
    every draft model; searches then also observe the drafts of other arms. One arm per round drafts
    all rows. Without `fresh`, what was learned stays for later requests.

    Exact with `Coupled`, which takes proposals of any kind. Raises ValueError for fewer than two
    arms, and for a head where all arms have to propose: it needs the target's states of its own
    draft.
    """

    def __init__(
        self, arms: Sequence[Drafter], selector: Selector, longest: int = 8, fresh: bool = True
    ) -> None:
        if len(arms) < 2:
            raise ValueError(f"a pool of {len(arms)} drafters leaves no choice; give two or more")
        for arm in arms:
            if selector.sees_all and isinstance(arm, Autoregressive):
                check_is_small_model(arm)
        self.arms, self.selector, self.longest, self.fresh = tuple(arms), selector, longest, fresh
        self._counts, self._lock = ArmCounts.begin(len(arms)), Lock()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (Kind.RACE,)  # that of the verifier: `Coupled` alone takes all of them

    @property
    def sees(self) -> str:
        return next((arm.sees for arm in self.arms if arm.sees != "nothing"), "nothing")

    @property
    def required_features(self) -> frozenset[str]:
        return frozenset().union(*(arm.required_features for arm in self.arms))

    @property
    def reads_prompt(self) -> bool:
        return any(arm.reads_prompt for arm in self.arms)

    @property
    def uses_trees(self) -> bool:
        return any(arm.uses_trees for arm in self.arms)

    def begin(self, context: Context) -> PoolState:
        counts = ArmCounts.begin(len(self.arms)) if self.fresh else self._counts
        return PoolState([arm.begin(context) for arm in self.arms], counts)

    def propose(self, context: Context, state: PoolState) -> Draft:
        with self._lock:
            state.arm = self.selector.choose(state.counts)
        asked = range(len(self.arms)) if self.selector.sees_all else [state.arm]
        state.drafts = {arm: self.arms[arm].propose(context, state.arms[arm]) for arm in asked}
        return state.drafts[state.arm]

    def observe(
        self, context: Context, state: PoolState, draft: Draft, scores: Scores, round_: Round
    ) -> PoolState:
        rewards = [0.0] * len(self.arms)
        for place, arm in enumerate(self.arms):
            own, drafted, turn = state.arms[place], draft, round_
            if place == state.arm:
                rewards[place] = self._reward(round_.accepted, round_)
            elif place in state.drafts:
                paths = match_paths(state.drafts[place], round_.tokens)
                rewards[place] = self._reward([len(path) for path in paths], round_)
                if isinstance(arm, Autoregressive):  # keeps what it has read of the accepted tokens
                    drafted = state.drafts[place]
                    turn = _round_of(drafted, paths, round_)
            elif isinstance(arm, Autoregressive):
                own = arm.skip_rows(context, own)
            else:
                continue
            state.arms[place] = arm.observe(context, own, drafted, scores, turn)
        if any(round_.tokens):
            with self._lock:
                self.selector.observe(state.counts, state.arm, rewards)
        return state

    def _reward(self, accepted: Sequence[int], round_: Round) -> float:
        """Accepted tokens of the rows that go on, over the most that count."""
        rows = [count for count, tokens in zip(accepted, round_.tokens, strict=True) if tokens]
        shares = [min(count, self.longest) / self.longest for count in rows]
        return sum(shares) / len(shares) if shares else 0.0


@dataclass
class PoolState:
    """The states of the arms, and what is known of them."""

    arms: list[Any]
    counts: ArmCounts
    arm: int = 0  # that drafts this round
    drafts: dict[int, Draft] = field(default_factory=dict)


def _round_of(draft: Draft, paths: tuple[tuple[int, ...], ...], round_: Round) -> Round:
    """The round as if this draft had been verified."""
    accepted, drafted = tuple(map(len, paths)), tuple(draft.mask.sum(-1).tolist())
    return replace(round_, path=paths, accepted=accepted, drafted=drafted, read=None)


def match_paths(
    draft: Draft, committed: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:  # per row, node indices
    """The path of a draft that the committed tokens of each row took, as far as it goes."""
    if not draft.nodes:
        return ((),) * draft.batch
    found = []
    columns = (draft.tokens.tolist(), draft.parents.tolist(), draft.mask.tolist())
    for tokens, parents, mask, row in zip(*columns, committed, strict=True):
        path: list[int] = []
        for token in row:
            above = path[-1] if path else -1
            node = next(
                (
                    node
                    for node, parent in enumerate(parents)
                    if parent == above and mask[node] and tokens[node] == token
                ),
                None,
            )
            if node is None:
                break
            path.append(node)
        found.append(tuple(path))
    return tuple(found)


def check_is_small_model(arm: Autoregressive) -> None:
    """Refuse heads where every arm proposes. Raises ValueError."""
    if not isinstance(arm.model, SmallModel):
        raise ValueError(
            f"{type(arm.model).__name__} reads the target's states of its own draft, so it cannot "
            "propose beside another one; give selector='ucb' or 'exp3'"
        )
