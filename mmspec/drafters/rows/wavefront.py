"""Rows of a picture written side by side: each begins a few tokens behind the one above (ZipAR).

Three rows of six codes, `window` 2. Letters are committed, digits are held: drawn already, behind a
gap. The block of the next forward holds the digits in raster order; `?` are the places that its
distributions speak of, `next` first.

    a b c d e ?        nodes   1 2 3   3     the 3 at the end stands in for the code before the
    1 2 3 ? . .        place   6 7 8  11     third row, which nobody knows yet: it is the newest
    ? . . . . .                              code of its row, and is read this once only
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from mmspec.codes.grid import Grid
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane
from mmspec.draft import Draft, Kind, Round, Scores, categorical
from mmspec.drafters.chosen_kind import ChoosesKind
from mmspec.drafters.rows.row_chain import DraftedCode, RowChain, drafted, drawn, said
from mmspec.recipe import LINEAR
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class RowShape:
    """How rows of a grid are drafted; the grid says how long that is."""

    words: str = "rows of the grid side by side"
    walk: ClassVar[str] = LINEAR


@dataclass(frozen=True)
class Wavefront(ChoosesKind):
    """Drafts a row's next code as soon as the row above has `window` codes (He et al. 2025).

    Every forward reads all that is held, in raster order behind the committed tokens, and draws one
    more code for each row that has begun. A held code was drawn from a distribution that lacked
    what stood in the gap before it. When the gap closes, the codes behind it become proposals:
    `Unchecked` takes them as they are (ZipAR), an exact verifier tests them against the
    distribution without a gap, so that the same front is a lossless way of drafting. Unlike in the
    published code a code is read again until it is committed; what is kept in memory never lacks a
    token before it.

    Forced tokens are proposals where they stand. A window of a whole row, or no grid, is plain
    decoding. Without a `grid` the one that the target offers in `context.shared["grid"]` counts.
    """

    window: int = 8
    grid: Grid | None = None
    kind: Kind | None = None
    choices: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.IID)
    sees: ClassVar[str] = "target-memory"
    carries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(
                f"window={self.window} begins a row before there is a code above it; give 1 or more"
            )

    def begin(self, context: Context) -> Front:
        assert context.scores is not None, (
            "a request begins with the distribution of its first token"
        )
        grid = context.shared.get("grid") if self.grid is None else self.grid
        like = categorical(context.scores.distribution)[:, :0]
        return Front(grid, like, [{} for _ in range(context.batch)])

    def propose(self, context: Context, state: Front) -> Draft:
        if state.grid is None:
            return context.nothing()
        lines = [
            lay(state.grid, self.window, context.generated(row), held, context.history[row][-1])
            for row, held in enumerate(state.held)
        ]
        state.fronts = [line.fronts for line in lines]
        if not any(line.nodes for line in lines):
            return context.nothing()
        return drafted(lines, state.held, state.like, self.kinds[0])

    def observe(
        self, context: Context, state: Front, draft: Draft, scores: Scores, kept: Round
    ) -> Front:
        """Draw the next code of every row that has begun, and forget what was committed."""
        if state.grid is None:
            return state
        done = [context.generated(row) for row in range(context.batch)]
        fronts = [
            [] if kept.finished[row] else [pair for pair in line if pair[1] >= done[row]]
            for row, line in enumerate(state.fronts)
        ]
        held = [
            {offset: code for offset, code in old.items() if offset >= start}
            for old, start in zip(state.held, done, strict=True)
        ]
        race = self.kinds[0] is Kind.RACE
        keys = context.noise.shared if race else partial(context.noise.fresh, FRONT)
        for old, codes in zip(held, drawn(fronts, scores, keys, settled=False), strict=True):
            old.update(codes)
        return replace(state, held=held, fronts=[])


FRONT = Lane.DRAFT  # the lane of the draws made here


@dataclass
class Front:
    """What is carried from round to round."""

    grid: Grid | None
    like: Categorical  # (B, 0) over the target's vocabulary, greedy or not
    held: list[dict[int, DraftedCode]]  # per batch row, by offset
    fronts: list[tuple[tuple[int, int], ...]] = field(default_factory=list)  # of this round


def lay(
    grid: Grid, window: int, start: int, held: Mapping[int, DraftedCode], last: int
) -> RowChain:
    """What is read behind `start` new tokens, `last` being the last one."""
    nodes, fronts = list[tuple[int, int]](), list[tuple[int, int]]()
    offset = start
    while (token := said(grid, held, offset)) is not None:
        nodes.append((offset - start, token))
        offset += 1
    sure, cell = len(nodes), grid.cell(offset)
    if cell is None:  # the picture is complete
        return RowChain(start, tuple(nodes), sure, ())
    fronts.append((sure, offset))
    row, count = cell
    newest = nodes[-1][1] if nodes else last
    while row + 1 < grid.height:
        before, row = count, row + 1
        first = grid.offset(row, 0)
        count = next((c for c in range(grid.width) if first + c not in held), grid.width)
        if not count and before < min(window, grid.width):
            break
        if grid.separator is not None:
            nodes.append((first - 1 - start, grid.separator))
        elif not count and before < grid.width:
            nodes.append((first - 1 - start, newest))  # stands in for a code yet to come
        nodes += [(first + c - start, held[first + c].token) for c in range(count)]
        if count < grid.width:
            fronts.append((len(nodes), first + count))
        if not count:
            break
        newest = nodes[-1][1]
    return RowChain(start, tuple(nodes), sure, tuple(fronts))
