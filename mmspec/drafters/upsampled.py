"""Blocks of rows drafted from a smaller picture, and mended where the target refuses (MuLo-SD).

Codes of earlier rounds are read again until they are committed, so that nothing in memory was read
behind a token that has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from mmspec.context import Context
from mmspec.draft import Draft, Kind, Round, Scores, categorical
from mmspec.drafters.page import Held, Line, Page, filled, judged, lay, spelt
from mmspec.drafters.sketch import Sketch, Sketcher
from mmspec.grid import Grid
from mmspec.laws import Categorical
from mmspec.resampling import Resampler


@dataclass(frozen=True)
class Upsampled:
    """Draws a row of a picture `ratio` times smaller, enlarges it, and proposes what comes out.

    Peruzzo et al. 2026 ("MuLo-SD"), with `LocalIslands` as verifier: what is refused is drawn from
    the target's laws in the rounds that follow, islands side by side, and kept codes are proposed
    again without being judged again. A block that is complete goes back to the small picture
    through the resampler, and the next row is drawn behind that. With a verifier that names no
    refused nodes the rest of a block is proposed again, and exact verifiers stay exact.

    Behind a block that was kept whole the target's own token begins the next one. Without a grid in
    `context.shared["grid"]` nothing is drafted. `layout` gives the drafter's grid; a grid that the
    ratio does not divide raises ValueError when a request begins.
    """

    sketcher: Sketcher
    sampler: Resampler
    layout: Callable[[int, int], Grid]
    ratio: int
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    sees: ClassVar[str] = "prompt"
    carries: ClassVar[bool] = True

    def begin(self, context: Context) -> Sheet | None:
        assert context.scores is not None, "a request begins with the law of its first token"
        grid = context.shared.get("grid")
        if grid is None:
            return None
        small = self.lowered(grid)
        like = categorical(context.scores.law)[:, :0]
        pages = [Page() for _ in range(context.batch)]
        return Sheet(grid, small, like, self.sketcher.begin(context, small), pages)

    def lowered(self, grid: Grid) -> Grid:
        """The drafter's grid."""
        if grid.height % self.ratio or grid.width % self.ratio:
            raise ValueError(
                f"a grid of {grid.height} x {grid.width} cannot be made {self.ratio} times "
                f"smaller; give one whose sides {self.ratio} divides"
            )
        return self.layout(grid.height // self.ratio, grid.width // self.ratio)

    def propose(self, context: Context, state: Sheet | None) -> Draft:
        if state is None:
            return context.nothing()
        ready = [
            row
            for row, page in enumerate(state.pages)
            if not context.finished[row] and page.is_done and page.begun < state.small.height
        ]
        if ready:
            self._next_blocks(context, state, ready)
        state.lines = [
            lay(state.grid, page, page.begun * self.ratio, context.generated(row))
            for row, page in enumerate(state.pages)
        ]
        return drafted(context, state)

    def observe(
        self, context: Context, state: Sheet | None, draft: Draft, scores: Scores, kept: Round
    ) -> Sheet | None:
        """Take the judgement, forget what is committed, and draw in the other islands."""
        if state is None:
            return None
        failed = None if kept.verdict.failed is None else kept.verdict.failed.tolist()
        for row, (page, line) in enumerate(zip(state.pages, state.lines, strict=True)):
            if failed is not None:
                page.judge(state.grid, line, failed[row])
            page.forget(context.generated(row))
            if kept.finished[row]:
                page.held, page.islands = {}, []
        _redraw(context, state, scores, kept)
        return state

    def _next_blocks(self, context: Context, state: Sheet, ready: Sequence[int]) -> None:
        """Draw the next small row of the ready rows of the batch and hold what it becomes."""
        pages, device = state.pages, context.device
        ended = [row for row in ready if pages[row].begun]
        if ended:
            grids = [self._above(context, state, row) for row in ended]
            small = self.sampler.down(torch.tensor(grids, device=device)).tolist()
            for row, tokens in zip(ended, small, strict=True):
                pages[row].small.append(tokens[pages[row].begun - 1])
        given = [spelt(state.small, page.small) for page in pages]
        drawn = self.sketcher.row(context, state.sketch, given).tolist()
        grids = [filled([*pages[row].small, drawn[row]], state.small.height) for row in ready]
        large = self.sampler.up(torch.tensor(grids, device=device)).tolist()
        for row, tokens in zip(ready, large, strict=True):
            page = pages[row]
            first = page.begun * self.ratio
            page.hold(state.grid, tokens, first, first + self.ratio, context.generated(row))
            page.begun += 1

    def _above(self, context: Context, state: Sheet, row: int) -> list[list[int]]:
        """The whole picture, its last known row repeated to the bottom."""
        grid, page = state.grid, state.pages[row]
        new = context.history[row][context.prompt[row] :]
        rows = []
        for above in range(page.begun * self.ratio):
            offsets = [grid.offset(above, column) for column in range(grid.width)]
            rows.append([new[o] if o < len(new) else page.held[o].token for o in offsets])
        return filled(rows, grid.height)


@dataclass
class Sheet:
    """What is carried from round to round."""

    grid: Grid
    small: Grid
    like: Categorical  # (B, 0) over the target's vocabulary, greedy or not
    sketch: Sketch
    pages: list[Page]
    lines: list[Line] = field(default_factory=list)  # of this round


def drafted(context: Context, state: Sheet) -> Draft:
    """The lines of all rows as one draft."""
    width = max(len(line.nodes) for line in state.lines)
    if not width:
        return context.nothing()
    table = []
    for page, line in zip(state.pages, state.lines, strict=True):
        nodes = [(*node, *judged(state.grid, page, line.start + node[0])) for node in line.nodes]
        table.append([*nodes, *[(0, 0, -1, -1)] * (width - len(nodes))])
    made = torch.tensor(table, device=context.device)  # (B, N, 4)
    sure = torch.tensor([[line.sure] for line in state.lines], device=context.device)
    mask = torch.arange(width, device=context.device) < sure
    draft = Draft.chain(made[..., 1], Kind.DET, _laws(state, width), mask)
    return replace(draft, ahead=made[..., 0], cells=made[..., 2:])


def _laws(state: Sheet, width: int) -> Categorical | None:  # (B, N)
    """What proposals were drawn from, point masses but for those of islands; None = no others."""
    laws = [
        [page.held[o].scores if (o := line.start + place) in page.held else None for place in known]
        for page, line in zip(state.pages, state.lines, strict=True)
        for known in [[place for place, _ in line.nodes[: line.sure]]]
    ]
    if all(law is None for row in laws for law in row):
        return None
    scores = state.like.scores.new_zeros(len(laws), width, state.like.size)
    for row, line in enumerate(state.lines):
        for node, law in enumerate(laws[row]):
            if law is None:
                scores[row, node] = -torch.inf
                scores[row, node, line.nodes[node][1]] = 0
            else:
                scores[row, node] = law
    return Categorical(scores, state.like.hard)


def _redraw(context: Context, state: Sheet, scores: Scores, kept: Round) -> None:
    """Draw one code in every island but the first, which the verifier has served."""
    fronts = [
        () if over else line.fronts for line, over in zip(state.lines, kept.finished, strict=True)
    ]
    width = max(map(len, fronts))
    if not width:
        return
    index = [[node for node, _ in line] + [0] * (width - len(line)) for line in fronts]
    place = torch.tensor(index, device=context.device)  # (B, F) rows of the law
    rows = torch.arange(len(index), device=place.device)[:, None]
    law = categorical(scores.law)[rows, place]
    drawn = law.sample(context.noise.shared(scores.position.gather(1, place))).tolist()
    for row, (page, line) in enumerate(zip(state.pages, fronts, strict=True)):
        for step, (_, offset) in enumerate(line):
            page.held[offset] = Held(drawn[row][step], True, law.scores[row, step])
            page.islands = [[o for o in part if o != offset] for part in page.islands]
        page.islands = [part for part in page.islands if part]
