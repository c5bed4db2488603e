"""Blocks of rows drafted from a smaller picture, and mended where the target refuses (MuLo-SD).

Codes of earlier rounds are read again until they are committed, so that nothing in memory was read
behind a token that has changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.connected_cells import Cells
from mmspec.codes.grid import Grid
from mmspec.codes.resampling import Lawful, Resampler, Trained
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane
from mmspec.draft import Draft, Drafter, Kind, Round, Scores, categorical
from mmspec.drafters.chosen_kind import ChoosesKind
from mmspec.drafters.neural.small_model import SmallModelKind
from mmspec.drafters.plain import Silent
from mmspec.drafters.rows.low_resolution import Sketch, Sketcher, ratio_of, sampler_of
from mmspec.drafters.rows.partial_image import PartialImage, filled, judged, lay, spelt
from mmspec.drafters.rows.row_chain import DraftedCode, RowChain, drafted, drawn
from mmspec.drafters.rows.wavefront import RowShape
from mmspec.models.code_resampler import FOLDER
from mmspec.recipe import Kit
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class Upsampled(ChoosesKind):
    """Draws a row of a picture `ratio` times smaller, enlarges it, and proposes what comes out.

    Peruzzo et al. 2026 ("MuLo-SD"), with `LocalIslands` as verifier: what is refused is drawn from
    the target's distributions in the rounds that follow, islands side by side, and kept codes are
    proposed again without being judged again. A block that is complete goes back to the small
    picture through the resampler, and the next row is drawn behind that. With a verifier that names
    no refused nodes the rest of a block is proposed again, and exact verifiers stay exact.

    With a `Lawful` resampler codes are drawn from its distributions, one behind the other, with the
    target's noise (RACE) or noise of their own (IID); what is neither committed nor judged is drawn
    anew in every round, behind what the target made of the codes before it.

    Behind a block that was kept whole the target's own token begins the next one. Without a grid in
    `context.shared["grid"]` nothing is drafted. `layout` gives the drafter's grid; a grid that the
    ratio does not divide raises ValueError when a request begins.
    """

    sketcher: Sketcher
    sampler: Resampler | Lawful
    layout: Callable[[int, int], Grid]
    ratio: int
    kind: Kind | None = None
    sees: ClassVar[str] = "prompt"
    carries: ClassVar[bool] = True

    @property
    def choices(self) -> tuple[Kind, ...]:
        return (Kind.RACE, Kind.IID) if isinstance(self.sampler, Lawful) else (Kind.DET,)

    def begin(self, context: Context) -> Sheet | None:
        assert context.scores is not None, (
            "a request begins with the distribution of its first token"
        )
        grid = context.shared.get("grid")
        if grid is None:
            return None
        small = self.lowered(grid)
        like = categorical(context.scores.distribution)[:, :0]
        pages = [PartialImage() for _ in range(context.batch)]
        sketch = self.sketcher.begin(context, small)
        return Sheet(grid, small, like, context.position(), sketch, pages)

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
        if isinstance(self.sampler, Lawful):
            enlarge(context, state, self.sampler, self.kinds[0])
        state.lines = [
            lay(state.grid, page, page.begun * self.ratio, context.generated(row))
            for row, page in enumerate(state.pages)
        ]
        width = max(len(line.nodes) for line in state.lines)
        if not width:
            return context.nothing()
        cells = [
            [judged(state.grid, page, line.start + place) for place, _ in line.nodes]
            + [(-1, -1)] * (width - len(line.nodes))
            for page, line in zip(state.pages, state.lines, strict=True)
        ]
        held = [page.held for page in state.pages]
        draft = drafted(state.lines, held, state.like, self.kinds[0])
        return replace(draft, extras=Cells(torch.tensor(cells, device=context.device)))

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
            grids = [pictured(context, state, row) for row in ended]
            small = self.sampler.down(torch.tensor(grids, device=device)).tolist()
            for row, tokens in zip(ended, small, strict=True):
                pages[row].small.append(tokens[pages[row].begun - 1])
        given = [spelt(state.small, page.small) for page in pages]
        codes = self.sketcher.row(context, state.sketch, given).tolist()
        for row in ready:
            pages[row].drawn = codes[row]
            pages[row].begun += 1
        if isinstance(self.sampler, Lawful):
            return
        grids = [sketched(state, row) for row in ready]
        large = self.sampler.up(torch.tensor(grids, device=device)).tolist()
        for row, tokens in zip(ready, large, strict=True):
            stop = pages[row].begun * self.ratio
            pages[row].hold(state.grid, tokens, stop - self.ratio, stop, context.generated(row))


@dataclass
class Sheet:
    """What is carried from round to round."""

    grid: Grid
    small: Grid
    like: Categorical  # (B, 0) over the target's vocabulary, greedy or not
    start: Tensor  # (B, 1) absolute position of the first tokens
    sketch: Sketch
    pages: list[PartialImage]
    lines: list[RowChain] = field(default_factory=list)  # of this round


def sketched(state: Sheet, row: int) -> list[list[int]]:
    """The small picture so far, its last row repeated to the bottom."""
    page = state.pages[row]
    filler = [int(state.small.ids()[0])] * state.small.width  # where nothing was ever drawn
    return filled([*page.small, page.drawn or filler], state.small.height)


def pictured(context: Context, state: Sheet, row: int) -> list[list[int]]:
    """The large picture so far, its last row repeated to the bottom; gaps hold any code."""
    grid, page = state.grid, state.pages[row]
    new, filler = context.history[row][context.prompt[row] :], int(grid.ids()[0])
    rows = []
    for above in range(max(page.begun, 1) * grid.height // state.small.height):
        offsets = [grid.offset(above, column) for column in range(grid.width)]
        held = [page.held[o].token if o in page.held else filler for o in offsets]
        rows.append([new[o] if o < len(new) else h for o, h in zip(offsets, held, strict=True)])
    return filled(rows, grid.height)


def enlarge(context: Context, state: Sheet, sampler: Lawful, kind: Kind) -> None:
    """Draw what is neither committed nor judged of all blocks.

    All at once, again and again, until every code was drawn behind the codes that are there: one
    code more is settled each time, and in a few times all are.
    """
    rows = range(context.batch)
    begun = torch.tensor([max(page.begun, 1) - 1 for page in state.pages], device=context.device)
    blocks = [block_of(state, row) for row in rows]
    free = [
        [
            not context.finished[row] and state.pages[row].lacks(o, context.generated(row))
            for o in of
        ]
        for row, of in enumerate(blocks)
    ]
    if not any(map(any, free)):
        return
    offset, is_free = (torch.tensor(each, device=context.device) for each in (blocks, free))
    position = state.start + offset  # (B, M), as everything of a block
    keys = context.noise.shared(position)
    if kind is not Kind.RACE:
        keys = context.noise.fresh(Lane.OTHER, offset)
    noise = 0 if state.like.hard else keys.gumbel(state.like.size)
    small = torch.tensor([sketched(state, row) for row in rows], device=context.device)
    large = torch.tensor([pictured(context, state, row) for row in rows], device=context.device)
    high = offset.shape[1] // state.grid.width
    place = begun[:, None] * high + torch.arange(high, device=begun.device)
    each = torch.arange(context.batch, device=begun.device)[:, None]
    for _ in range(offset.shape[1] + 1):
        logits = sampler.distribution(small, large, begun).flatten(1, 2)
        distribution = context.sampling.distribution(logits, None, position)
        before = large[each, place].flatten(1)
        after = torch.where(is_free, (distribution.scores + noise).argmax(-1), before)
        if torch.equal(before, after):
            break
        large[each, place] = after.unflatten(1, (high, -1))
    for row, tokens in enumerate(after.tolist()):
        for node, (o, token) in enumerate(zip(blocks[row], tokens, strict=True)):
            if free[row][node]:
                state.pages[row].held[o] = DraftedCode(token, scores=distribution.scores[row, node])


def block_of(state: Sheet, row: int) -> list[int]:
    """Offsets of the codes of a picture's newest block."""
    high = state.grid.height // state.small.height
    stop = max(state.pages[row].begun, 1) * high
    places = product(range(stop - high, stop), range(state.grid.width))
    return [state.grid.offset(*place) for place in places]


def _redraw(context: Context, state: Sheet, scores: Scores, kept: Round) -> None:
    """Draw one code in every island but the first, which the verifier has served."""
    fronts = [
        () if over else line.fronts for line, over in zip(state.lines, kept.finished, strict=True)
    ]
    for page, codes in zip(
        state.pages, drawn(fronts, scores, context.noise.shared, settled=True), strict=True
    ):
        page.held.update(codes)
        left = [[offset for offset in part if offset not in codes] for part in page.islands]
        page.islands = [part for part in left if part]


def smaller_picture(kit: Kit) -> Drafter:
    """A model that draws a smaller grid; plain decoding for a target that draws nothing."""
    if not isinstance(kit.shape, RowShape):
        raise ValueError("a block is as long as the grid makes it; drop length= and tree=")
    if not kit.target.family.draws:
        return Silent()
    if kit.sees != "prompt":
        raise ValueError(
            f"MuLo-SD drafts with a model that draws behind the target's prompt, not one that sees "
            f"{kit.sees!r}; give drafter= a model that draws, and drop sees="
        )
    assert kit.drafter is not None
    fine, coarse = kit.target.check_draws(), kit.drafter.check_draws()
    ratio = ratio_of(fine, coarse, kit.options["ratio"])
    sampler = sampler_of(kit, fine, coarse, ratio)
    return Upsampled(Sketcher(kit.drafter), sampler, coarse.layout, ratio)


def _check_draws(target: Reader, small: Reader) -> None:
    """Refuse a draft model that draws nothing, for a target that draws. Raises ValueError."""
    if target.family.draws:
        small.check_draws()


def _save_beside(drafter: Any, folder: Path) -> None:
    """Write the resampler of a drafter that has a trained one."""
    if isinstance(drafter, Upsampled) and isinstance(drafter.sampler, Trained):
        drafter.sampler.model.save_pretrained(folder / FOLDER)


LOW_RESOLUTION = SmallModelKind(
    "model of a smaller picture", _check_draws, _save_beside, marks=(FOLDER,), translates=True
)
