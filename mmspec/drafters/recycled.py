"""Long drafts that stop where the draft model is unsure, and that are used again where refused.

SpecASR (Wei et al. 2025, arXiv 2507.18181): a draft model that hears is soon in step with the
target again behind a mismatch, so the rest of a refused draft is mostly right, some places on.

    refused   the red [circle] is on a hill       the target says "square"
    drafted   square is                           in step at "is"
    recycled            on a hill                 checked by the draft model in one forward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmspec.draft import Kind
from mmspec.drafters.growth import DraftModel, News, Shape, Sprout, nothing
from mmspec.drafters.lengths.length import useful
from mmspec.drafters.trees.forest import Forest, NextTokens
from mmspec.recipe import LINEAR
from mmspec.targets.tokens.context import Context


@dataclass
class Trunk:
    """The chain of one row while it grows."""

    stale: Sequence[int]  # the rest of the last draft that was refused
    pointer: int = 0  # the place in it that the next token is looked for at
    nodes: list[int] = field(default_factory=list)
    unsure: list[tuple[int, NextTokens]] = field(
        default_factory=list
    )  # places, and what stood there
    is_open: bool = True


@dataclass
class Tails:
    """What is remembered between rounds: drafts as they were proposed, and what is left of them."""

    stale: list[list[int]]
    proposed: list[list[int]]


@dataclass(frozen=True)
class Recycled(Shape):
    """Draft until the best token has less than `theta`, that one included, or `most` are drafted.

    Behind a mismatch the rest of the draft is kept. A new token that stands in it, at most `window`
    places from where it is expected, brings what follows there: the draft model reads that in one
    forward and cuts it where it would say something else or is unsure. `window=None` recycles
    nothing; `theta=0` then drafts `most` tokens. Reconstructed: the order in which places are
    looked at, and that the unsure token is drafted.
    """

    most: int = 24
    theta: float = 0.4
    window: int | None = 2
    ends: frozenset[int] = frozenset()  # tokens behind which nothing is drafted
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.DET)
    walk: ClassVar[str] = LINEAR
    stops: ClassVar[bool] = True  # whether a trunk ends where it is unsure
    choices: ClassVar[int] = 1  # tokens that the draft model is asked for at a place

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most={self.most} is no draft length; give 1 or more")
        if not 0 <= self.theta <= 1:
            raise ValueError(f"theta={self.theta} is no probability; give one within 0..1")
        if self.window is not None and self.window < 0:
            raise ValueError(f"window={self.window} is no distance; give 0 or more, or None")

    @property
    def words(self) -> str:
        again = "" if self.window is None else ", recycled where refused"
        return f"chain of at most {self.most} while sure{again}"

    @property
    def longest(self) -> int:
        return self.most

    def begin(self) -> Tails:
        return Tails([], [])

    def grow(
        self, model: DraftModel, context: Context, state: Any, own: Tails, kind: Kind
    ) -> Sprout:
        budget = min(self.most, useful(context))
        if not budget:
            return nothing(context)
        forest = Forest(model, context, state, kind, self.choices)
        trunks = _trunks(context, own, self.window is not None)
        _draft(forest, trunks, Rules(budget, self.theta, self.window, self.stops, self.ends))
        own.proposed = [list(row) for row in forest.tokens]
        return self.finished(forest, trunks, budget)

    def finished(self, forest: Forest, trunks: Sequence[Trunk], budget: int) -> Sprout:
        """What is proposed, once the trunks of all rows stand."""
        return forest.chains()

    def observe(self, own: Tails, news: News) -> Tails:
        """What stands behind the first mismatch of every draft; of none there is nothing left."""
        if not own.proposed:
            return Tails([], [])
        rows = zip(own.proposed, news.kept.accepted, strict=True)
        return Tails([row[accepted + 1 :] for row, accepted in rows], [])


def _trunks(context: Context, own: Tails, recycles: bool) -> list[Trunk]:
    """A trunk per row; finished rows draft nothing."""
    stale = own.stale if recycles and own.stale else [[]] * context.batch
    done = context.finished or (False,) * context.batch
    return [Trunk(tail, is_open=not end) for tail, end in zip(stale, done, strict=True)]


@dataclass(frozen=True)
class Rules:
    """When a trunk ends, and what is used again."""

    budget: int
    theta: float
    window: int | None
    stops: bool  # whether it ends where it is unsure
    ends: frozenset[int]  # tokens that end a text


def _draft(forest: Forest, trunks: Sequence[Trunk], rules: Rules) -> None:
    """Let all trunks grow, one forward at a time."""
    choices = forest.root()
    while True:
        for row, trunk in enumerate(trunks):
            if trunk.is_open:
                _step(forest, row, trunk, choices[row], rules)
        if not any(trunk.is_open for trunk in trunks):
            return
        tails = [_tail(forest, row, trunk, rules) for row, trunk in enumerate(trunks)]
        asked = [
            [*(trunk.nodes[-1:] if trunk.is_open else []), *tail]
            for trunk, tail in zip(trunks, tails, strict=True)
        ]
        found = forest.read(asked)
        for row, (trunk, tail) in enumerate(zip(trunks, tails, strict=True)):
            choices[row] = _merged(forest, row, trunk, tail, found[row], rules)


def aligned(token: int, text: Sequence[int], pointer: int, window: int | None) -> int | None:
    """Where a text has a token: the first place from one before `pointer` to `window` behind."""
    if window is None:
        return None
    places = range(max(pointer - 1, 0), min(pointer + window + 1, len(text)))
    return next((at for at in places if text[at] == token), None)


def _step(forest: Forest, row: int, trunk: Trunk, choice: NextTokens, rules: Rules) -> None:
    """The next token of a trunk."""
    token, parent = choice.tokens[0], trunk.nodes[-1] if trunk.nodes else -1
    is_unsure = choice.confidence < rules.theta
    if is_unsure:
        trunk.unsure.append((len(trunk.nodes), choice))
    trunk.nodes.append(forest.add(row, token, parent))
    is_last = token in rules.ends or len(trunk.nodes) == rules.budget
    trunk.is_open = not is_last and not (rules.stops and is_unsure)


def _tail(forest: Forest, row: int, trunk: Trunk, rules: Rules) -> list[int]:
    """Nodes of what followed the trunk's last token in the draft that was refused, if it did."""
    if not trunk.is_open:
        return []
    token = forest.tokens[row][trunk.nodes[-1]]
    place = aligned(token, trunk.stale, trunk.pointer, rules.window)
    if place is None:
        trunk.pointer += 1
        return []
    trunk.pointer = place + 1
    room = rules.budget - len(trunk.nodes)
    nodes, parent = list[int](), trunk.nodes[-1]
    for token in trunk.stale[place + 1 : place + 1 + room]:
        nodes.append(parent := forest.add(row, token, parent))
    return nodes


def _merged(
    forest: Forest,
    row: int,
    trunk: Trunk,
    tail: Sequence[int],
    found: Sequence[NextTokens],
    rules: Rules,
) -> NextTokens:
    """Keep of a tail what the draft model says too; returns what it says behind that."""
    kept = 0
    while kept < len(tail):
        choice, token = found[kept], forest.tokens[row][tail[kept]]
        is_unsure = choice.confidence < rules.theta
        if choice.tokens[0] != token or (rules.stops and is_unsure):
            break
        if is_unsure:
            trunk.unsure.append((len(trunk.nodes), choice))
        trunk.nodes.append(tail[kept])
        kept += 1
    forest.cut(row, len(tail) - kept)
    trunk.pointer += kept
    if tail and kept == len(tail):
        trunk.is_open = False  # the refused draft ended here, too
    return found[kept]
