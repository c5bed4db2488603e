"""Rows of an image decoded in parallel, each a few tokens after the one above (ZipAR).

Three rows of six codes, `window` 2. Letters are committed codes, digits are drawn codes after a
gap. The block of the next forward holds the digits in raster order; `?` are the positions of its
distributions, `next` first.

    a b c d e ?        nodes   1 2 3   3     the 3 at the end stands in for the code before the
    1 2 3 ? . .        place   6 7 8  11     third row, which is not known yet: it is the newest
    ? . . . . .                              code of its row, and is read only in this round
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from mmspec.codes.grid import Grid
from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import Lane
from mmspec.draft import Draft, Kind, Round, Scores
from mmspec.drafters.draft_model import MultiKindDrafter
from mmspec.drafters.rows.row_chain import (
    DraftedCode,
    RowChain,
    build_draft,
    draw_codes,
    known_token,
)
from mmspec.recipe import LINEAR
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class RowShape:
    """The shape of row drafts; the grid determines their length."""

    description: str = "rows of the grid side by side"
    walk: ClassVar[str] = LINEAR


@dataclass(frozen=True)
class Wavefront(MultiKindDrafter):
    """Drafts a row's next code as soon as the row above has `window` codes (He et al. 2025).

    Every forward reads all drawn codes, in raster order after the committed tokens, and draws one
    more code for each row that has begun. A drawn code comes from a distribution without the codes
    in the gap before it. When the gap closes, the codes after it become proposals: `Unchecked`
    accepts them (ZipAR); an exact verifier tests them against the distribution without a gap, so
    that the same wavefront is lossless. Unlike in the published code a code is read again until it
    is committed; cached states never lack a token before them.

    Forced tokens are proposed at their positions. A window of a whole row, or no grid, is plain
    decoding. Without a `grid` the target's `context.shared["grid"]` is used.
    """

    window: int = 8
    grid: Grid | None = None
    kind: Kind | None = None
    choices: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.IID)
    sees: ClassVar[str] = "target-memory"
    carries_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(
                f"window={self.window} starts a row before the first code above it; give 1 or more"
            )

    def begin(self, context: Context) -> WavefrontState:
        assert context.scores is not None, (
            "a request begins with the distribution of its first token"
        )
        grid = context.shared.get("grid") if self.grid is None else self.grid
        like = as_categorical(context.scores.distribution)[:, :0]
        return WavefrontState(grid, like, [{} for _ in range(context.batch)])

    def propose(self, context: Context, state: WavefrontState) -> Draft:
        if state.grid is None:
            return context.empty_draft()
        chains = [
            build_chain(
                state.grid,
                self.window,
                context.num_generated(row),
                drafted_codes,
                context.history[row][-1],
            )
            for row, drafted_codes in enumerate(state.drafted_codes)
        ]
        state.fronts = [chain.fronts for chain in chains]
        if not any(chain.nodes for chain in chains):
            return context.empty_draft()
        return build_draft(chains, state.drafted_codes, state.like, self.kinds[0])

    def observe(
        self, context: Context, state: WavefrontState, draft: Draft, scores: Scores, round_: Round
    ) -> WavefrontState:
        """Draw the next code of every row that has begun, and drop what was committed."""
        if state.grid is None:
            return state
        done = [context.num_generated(row) for row in range(context.batch)]
        fronts = [
            [] if round_.finished[row] else [pair for pair in chain if pair[1] >= done[row]]
            for row, chain in enumerate(state.fronts)
        ]
        drafted_codes = [
            {offset: code for offset, code in old.items() if offset >= start}
            for old, start in zip(state.drafted_codes, done, strict=True)
        ]
        race = self.kinds[0] is Kind.RACE
        keys = context.noise.shared_keys if race else partial(context.noise.fresh_keys, FRONT)
        for old, codes in zip(
            drafted_codes, draw_codes(fronts, scores, keys, is_final=False), strict=True
        ):
            old.update(codes)
        return replace(state, drafted_codes=drafted_codes, fronts=[])


FRONT = Lane.DRAFT  # noise lane of these draws


@dataclass
class WavefrontState:
    """The state between rounds."""

    grid: Grid | None
    like: Categorical  # (B, 0) over the target's vocabulary, greedy or not
    drafted_codes: list[dict[int, DraftedCode]]  # per batch row, by offset
    fronts: list[tuple[tuple[int, int], ...]] = field(default_factory=list)  # of this round


def build_chain(
    grid: Grid, window: int, start: int, drafted_codes: Mapping[int, DraftedCode], last: int
) -> RowChain:
    """The chain to read after `start` new tokens, of which `last` is the last."""
    nodes, fronts = list[tuple[int, int]](), list[tuple[int, int]]()
    offset = start
    while (token := known_token(grid, drafted_codes, offset)) is not None:
        nodes.append((offset - start, token))
        offset += 1
    num_contiguous, cell = len(nodes), grid.cell_at(offset)
    if cell is None:  # the image is complete
        return RowChain(start, tuple(nodes), num_contiguous, ())
    fronts.append((num_contiguous, offset))
    row, count = cell
    newest = nodes[-1][1] if nodes else last
    while row + 1 < grid.height:
        before, row = count, row + 1
        first = grid.offset_of(row, 0)
        count = next((c for c in range(grid.width) if first + c not in drafted_codes), grid.width)
        if not count and before < min(window, grid.width):
            break
        if grid.separator is not None:
            nodes.append((first - 1 - start, grid.separator))
        elif not count and before < grid.width:
            nodes.append((first - 1 - start, newest))  # stands in for an unknown code
        nodes += [(first + c - start, drafted_codes[first + c].token) for c in range(count)]
        if count < grid.width:
            fronts.append((len(nodes), first + count))
        if not count:
            break
        newest = nodes[-1][1]
    return RowChain(start, tuple(nodes), num_contiguous, tuple(fronts))
