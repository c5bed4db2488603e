"""Long drafts that stop where the draft model is uncertain, with recycling of rejected suffixes.

SpecASR (Wei et al. 2025, arXiv 2507.18181): a draft model for speech soon agrees with the target
again after a mismatch, so the rest of a rejected draft is mostly right, a few positions later.

    rejected  the red [circle] is on a hill       target: "square"
    drafted   square is                           aligned again at "is"
    recycled            on a hill                 verified by the draft model in one forward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmspec.draft import Kind
from mmspec.drafters.draft_model import DraftModel, DraftUpdate, GrownDraft, empty_growth
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.drafters.shapes import Shape
from mmspec.drafters.trees.forest import Forest, NextTokens
from mmspec.recipe import LINEAR
from mmspec.targets.tokens.context import Context


@dataclass
class Trunk:
    """The chain of one row while it grows."""

    stale: Sequence[int]  # the rest of the last rejected draft
    pointer: int = 0  # position in it where the next token is expected
    nodes: list[int] = field(default_factory=list)
    unsure: list[tuple[int, NextTokens]] = field(
        default_factory=list
    )  # places, and what stood there
    is_open: bool = True


@dataclass
class RejectedTails:
    """The state between rounds: drafts as proposed, and their rejected suffixes."""

    stale: list[list[int]]
    proposed: list[list[int]]


@dataclass(frozen=True)
class RecyclingChain(Shape):
    """Draft up to the first token of confidence below `theta`, inclusive, or `max_length` tokens.

    After a mismatch the rest of the draft is kept. Where a new token occurs in it, at most `window`
    positions from where it is expected, the tokens after it are recycled: the draft model reads
    them in one forward and cuts them where it predicts another token or is uncertain. `window=None`
    disables recycling; `theta=0` then drafts `max_length` tokens. Reconstructed: the order in which
    positions are searched, and that the uncertain token is drafted.
    """

    max_length: int = 24
    theta: float = 0.4
    window: int | None = 2
    ends: frozenset[int] = frozenset()  # tokens after which nothing is drafted
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    walk: ClassVar[str] = LINEAR
    stops: ClassVar[bool] = True  # whether a trunk ends where it is uncertain
    num_candidates: ClassVar[int] = 1  # candidate tokens per position

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"max_length={self.max_length} is not a draft length; give 1 or more")
        if not 0 <= self.theta <= 1:
            raise ValueError(f"theta={self.theta} is not a probability; give one within 0..1")
        if self.window is not None and self.window < 0:
            raise ValueError(f"window={self.window} is not a distance; give 0 or more, or None")

    @property
    def description(self) -> str:
        suffix = "" if self.window is None else ", recycled after rejections"
        return f"chain of at most {self.max_length} while sure{suffix}"

    @property
    def max_depth(self) -> int:
        return self.max_length

    def begin(self) -> RejectedTails:
        return RejectedTails([], [])

    def grow(
        self, model: DraftModel, context: Context, state: Any, tails: RejectedTails, kind: Kind
    ) -> GrownDraft:
        budget = min(self.max_length, max_useful_length(context))
        if not budget:
            return empty_growth(context)
        forest = Forest(model, context, state, kind, self.num_candidates)
        trunks = _trunks(context, tails, self.window is not None)
        _grow_trunks(
            forest, trunks, TrunkRules(budget, self.theta, self.window, self.stops, self.ends)
        )
        tails.proposed = [list(row) for row in forest.tokens]
        return self.build_draft(forest, trunks, budget)

    def build_draft(self, forest: Forest, trunks: Sequence[Trunk], budget: int) -> GrownDraft:
        """Build the draft from the trunks of all rows."""
        return forest.chains()

    def observe(self, tails: RejectedTails, update: DraftUpdate) -> RejectedTails:
        """Keep the tokens after the first mismatch of every draft."""
        if not tails.proposed:
            return RejectedTails([], [])
        rows = zip(tails.proposed, update.round.accepted, strict=True)
        return RejectedTails([row[accepted + 1 :] for row, accepted in rows], [])


def _trunks(context: Context, tails: RejectedTails, recycles: bool) -> list[Trunk]:
    """A trunk per row; finished rows draft nothing."""
    stale = tails.stale if recycles and tails.stale else [[]] * context.batch
    done = context.finished or (False,) * context.batch
    return [Trunk(tail, is_open=not end) for tail, end in zip(stale, done, strict=True)]


@dataclass(frozen=True)
class TrunkRules:
    """When a trunk ends, and what is recycled."""

    budget: int
    theta: float
    window: int | None
    stops: bool  # whether it ends where it is uncertain
    ends: frozenset[int]  # tokens that end a text


def _grow_trunks(forest: Forest, trunks: Sequence[Trunk], rules: TrunkRules) -> None:
    """Grow all trunks, one forward at a time."""
    num_candidates = forest.root()
    while True:
        for row, trunk in enumerate(trunks):
            if trunk.is_open:
                _step(forest, row, trunk, num_candidates[row], rules)
        if not any(trunk.is_open for trunk in trunks):
            return
        tails = [_tail(forest, row, trunk, rules) for row, trunk in enumerate(trunks)]
        nodes_per_row = [
            [*(trunk.nodes[-1:] if trunk.is_open else []), *tail]
            for trunk, tail in zip(trunks, tails, strict=True)
        ]
        found = forest.read(nodes_per_row)
        for row, (trunk, tail) in enumerate(zip(trunks, tails, strict=True)):
            num_candidates[row] = _merge_tail(forest, row, trunk, tail, found[row], rules)


def find_aligned(token: int, text: Sequence[int], pointer: int, window: int | None) -> int | None:
    """Position of a token in a text: the first from one before `pointer` to `window` after it."""
    if window is None:
        return None
    places = range(max(pointer - 1, 0), min(pointer + window + 1, len(text)))
    return next((at for at in places if text[at] == token), None)


def _step(forest: Forest, row: int, trunk: Trunk, choice: NextTokens, rules: TrunkRules) -> None:
    """Add the next token of a trunk."""
    token, parent = choice.tokens[0], trunk.nodes[-1] if trunk.nodes else -1
    is_unsure = choice.confidence < rules.theta
    if is_unsure:
        trunk.unsure.append((len(trunk.nodes), choice))
    trunk.nodes.append(forest.add(row, token, parent))
    is_last = token in rules.ends or len(trunk.nodes) == rules.budget
    trunk.is_open = not is_last and not (rules.stops and is_unsure)


def _tail(forest: Forest, row: int, trunk: Trunk, rules: TrunkRules) -> list[int]:
    """Add nodes for what followed the trunk's last token in the rejected draft, if anything."""
    if not trunk.is_open:
        return []
    token = forest.tokens[row][trunk.nodes[-1]]
    place = find_aligned(token, trunk.stale, trunk.pointer, rules.window)
    if place is None:
        trunk.pointer += 1
        return []
    trunk.pointer = place + 1
    max_tokens = rules.budget - len(trunk.nodes)
    nodes, parent = list[int](), trunk.nodes[-1]
    for token in trunk.stale[place + 1 : place + 1 + max_tokens]:
        nodes.append(parent := forest.add(row, token, parent))
    return nodes


def _merge_tail(
    forest: Forest,
    row: int,
    trunk: Trunk,
    tail: Sequence[int],
    found: Sequence[NextTokens],
    rules: TrunkRules,
) -> NextTokens:
    """Keep the part of a tail that the draft model also predicts; returns its next prediction."""
    accepted = 0
    while accepted < len(tail):
        choice, token = found[accepted], forest.tokens[row][tail[accepted]]
        is_unsure = choice.confidence < rules.theta
        if choice.tokens[0] != token or (rules.stops and is_unsure):
            break
        if is_unsure:
            trunk.unsure.append((len(trunk.nodes), choice))
        trunk.nodes.append(tail[accepted])
        accepted += 1
    forest.cut(row, len(tail) - accepted)
    trunk.pointer += accepted
    if tail and accepted == len(tail):
        trunk.is_open = False  # the rejected draft ended here as well
    return found[accepted]
