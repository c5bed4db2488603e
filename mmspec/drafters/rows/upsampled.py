"""Blocks of rows drafted from a smaller image, with rejected codes redrawn by the target (MuLo-SD).

Codes of earlier rounds are read again until they are committed, so that no cached state depends on
a token that has changed since.
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
from mmspec.codes.resampling import ConditionalResampler, Resampler, TrainedResampler
from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import Lane
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.draft_model import MultiKindDrafter
from mmspec.drafters.neural.small_model import SmallModelKind
from mmspec.drafters.plain import NoDraft
from mmspec.drafters.rows.low_resolution_model import (
    LowResolutionModel,
    LowResolutionState,
    build_upsampler,
    ratio_of,
)
from mmspec.drafters.rows.partial_image import (
    PartialImage,
    build_chain,
    cell_to_verify,
    image_prefix,
    repeat_last_row,
)
from mmspec.drafters.rows.row_chain import DraftedCode, RowChain, build_draft, draw_codes
from mmspec.drafters.rows.wavefront import RowShape
from mmspec.models.code_resampler import FOLDER
from mmspec.recipe import Kit
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class UpsampledDrafter(MultiKindDrafter):
    """Generates a row of an image `ratio` times smaller, enlarges it, and proposes the result.

    Peruzzo et al. 2026 ("MuLo-SD"), with `LocalIslands` as verifier: rejected codes are drawn from
    the target's distributions in the following rounds, islands in parallel, and accepted codes are
    proposed again without another verification. A complete block is down-sampled by the resampler,
    and the next small row is generated after it. With a verifier that returns no rejected nodes the
    rest of a block is proposed again, and exact verifiers stay exact.

    With a `ConditionalResampler` codes are drawn from its distributions, one after the other, with
    the target's noise (RACE) or noise of their own (IID); codes that are neither committed nor
    verified are redrawn in every round, conditioned on the target's codes before them.

    After a fully accepted block the target's own token begins the next one. Nothing is drafted
    without a grid in `context.shared["grid"]`. `layout` gives the drafter's grid; a grid that the
    ratio does not divide raises ValueError when a request begins.
    """

    sketcher: LowResolutionModel
    sampler: Resampler | ConditionalResampler
    layout: Callable[[int, int], Grid]
    ratio: int
    kind: Kind | None = None
    sees: ClassVar[str] = "prompt"
    carries_tokens: ClassVar[bool] = True

    @property
    def choices(self) -> tuple[Kind, ...]:
        return (
            (Kind.RACE, Kind.IID) if isinstance(self.sampler, ConditionalResampler) else (Kind.DET,)
        )

    def begin(self, context: Context) -> UpsampledState | None:
        assert context.scores is not None, (
            "a request begins with the distribution of its first token"
        )
        grid = context.shared.get("grid")
        if grid is None:
            return None
        small = self.small_grid(grid)
        like = as_categorical(context.scores.distribution)[:, :0]
        images = [PartialImage() for _ in range(context.batch)]
        sketch = self.sketcher.begin(context, small)
        return UpsampledState(grid, small, like, context.position(), sketch, images)

    def small_grid(self, grid: Grid) -> Grid:
        """The drafter's grid."""
        if grid.height % self.ratio or grid.width % self.ratio:
            raise ValueError(
                f"a grid of {grid.height} x {grid.width} cannot be made {self.ratio} times "
                f"smaller; give one whose sides {self.ratio} divides"
            )
        return self.layout(grid.height // self.ratio, grid.width // self.ratio)

    def propose(self, context: Context, state: UpsampledState | None) -> Draft:
        if state is None:
            return context.empty_draft()
        ready = [
            row
            for row, image in enumerate(state.images)
            if not context.finished[row] and image.is_done and image.num_blocks < state.small.height
        ]
        if ready:
            self._next_blocks(context, state, ready)
        if isinstance(self.sampler, ConditionalResampler):
            enlarge(context, state, self.sampler, self.kinds[0])
        state.chains = [
            build_chain(
                state.grid, image, image.num_blocks * self.ratio, context.num_generated(row)
            )
            for row, image in enumerate(state.images)
        ]
        width = max(len(chain.nodes) for chain in state.chains)
        if not width:
            return context.empty_draft()
        cells = [
            [cell_to_verify(state.grid, image, chain.start + place) for place, _ in chain.nodes]
            + [(-1, -1)] * (width - len(chain.nodes))
            for image, chain in zip(state.images, state.chains, strict=True)
        ]
        drafted_codes = [image.drafted_codes for image in state.images]
        draft = build_draft(state.chains, drafted_codes, state.like, self.kinds[0])
        return replace(draft, extras=Cells(torch.tensor(cells, device=context.device)))

    def observe(
        self,
        context: Context,
        state: UpsampledState | None,
        draft: Draft,
        scores: Scores,
        round_: Round,
    ) -> UpsampledState | None:
        """Apply the verdict, drop what is committed, and redraw the other islands."""
        if state is None:
            return None
        failed = (
            None if round_.verdict.resample_mask is None else round_.verdict.resample_mask.tolist()
        )
        for row, (image, chain) in enumerate(zip(state.images, state.chains, strict=True)):
            if failed is not None:
                image.judge(state.grid, chain, failed[row])
            image.drop_committed(context.num_generated(row))
            if round_.finished[row]:
                image.drafted_codes, image.islands = {}, []
        _redraw(context, state, scores, round_)
        return state

    def _next_blocks(self, context: Context, state: UpsampledState, ready: Sequence[int]) -> None:
        """Generate the next small row of the ready batch rows and add the enlarged rows."""
        images, device = state.images, context.device
        ended = [row for row in ready if images[row].num_blocks]
        if ended:
            grids = [large_image(context, state, row) for row in ended]
            small = self.sampler.down(torch.tensor(grids, device=device)).tolist()
            for row, tokens in zip(ended, small, strict=True):
                images[row].small.append(tokens[images[row].num_blocks - 1])
        given = [image_prefix(state.small, image.small) for image in images]
        codes = self.sketcher.row(context, state.sketch, given).tolist()
        for row in ready:
            images[row].last_row = codes[row]
            images[row].num_blocks += 1
        if isinstance(self.sampler, ConditionalResampler):
            return
        grids = [small_image(state, row) for row in ready]
        large = self.sampler.up(torch.tensor(grids, device=device)).tolist()
        for row, tokens in zip(ready, large, strict=True):
            stop = images[row].num_blocks * self.ratio
            images[row].add_rows(
                state.grid, tokens, stop - self.ratio, stop, context.num_generated(row)
            )


@dataclass
class UpsampledState:
    """The state between rounds."""

    grid: Grid
    small: Grid
    like: Categorical  # (B, 0) over the target's vocabulary, greedy or not
    start: Tensor  # (B, 1) absolute position of the first tokens
    sketch: LowResolutionState
    images: list[PartialImage]
    chains: list[RowChain] = field(default_factory=list)  # of this round


def small_image(state: UpsampledState, row: int) -> list[list[int]]:
    """The small image so far, its last row repeated to the bottom."""
    image = state.images[row]
    filler = [int(state.small.ids()[0])] * state.small.width  # before the first row
    return repeat_last_row([*image.small, image.last_row or filler], state.small.height)


def large_image(context: Context, state: UpsampledState, row: int) -> list[list[int]]:
    """The large image so far, its last row repeated to the bottom; gaps hold any code."""
    grid, image = state.grid, state.images[row]
    new, filler = context.history[row][context.prompt[row] :], int(grid.ids()[0])
    rows = []
    for above in range(max(image.num_blocks, 1) * grid.height // state.small.height):
        offsets = [grid.offset_of(above, column) for column in range(grid.width)]
        drafted_codes = [
            image.drafted_codes[o].token if o in image.drafted_codes else filler for o in offsets
        ]
        rows.append(
            [new[o] if o < len(new) else h for o, h in zip(offsets, drafted_codes, strict=True)]
        )
    return repeat_last_row(rows, grid.height)


def enlarge(
    context: Context, state: UpsampledState, sampler: ConditionalResampler, kind: Kind
) -> None:
    """Draw all codes of the newest blocks that are neither committed nor verified.

    All at once, repeated until every code was drawn conditioned on the current codes: each
    iteration fixes at least one more code, and a few iterations suffice.
    """
    rows = range(context.batch)
    num_blocks = torch.tensor(
        [max(image.num_blocks, 1) - 1 for image in state.images], device=context.device
    )
    blocks = [block_of(state, row) for row in rows]
    free = [
        [
            not context.finished[row]
            and state.images[row].needs_draft(o, context.num_generated(row))
            for o in of
        ]
        for row, of in enumerate(blocks)
    ]
    if not any(map(any, free)):
        return
    offset, is_free = (torch.tensor(each, device=context.device) for each in (blocks, free))
    position = state.start + offset  # (B, M), as all tensors of a block
    keys = context.noise.shared_keys(position)
    if kind is not Kind.RACE:
        keys = context.noise.fresh_keys(Lane.OTHER, offset)
    noise = 0 if state.like.hard else keys.gumbel(state.like.size)
    small = torch.tensor([small_image(state, row) for row in rows], device=context.device)
    large = torch.tensor([large_image(context, state, row) for row in rows], device=context.device)
    high = offset.shape[1] // state.grid.width
    place = num_blocks[:, None] * high + torch.arange(high, device=num_blocks.device)
    each = torch.arange(context.batch, device=num_blocks.device)[:, None]
    for _ in range(offset.shape[1] + 1):
        logits = sampler.logits(small, large, num_blocks).flatten(1, 2)
        distribution = context.sampling.distribution(logits, None, position)
        before = large[each, place].flatten(1)
        after = torch.where(is_free, (distribution.scores + noise).argmax(-1), before)
        if torch.equal(before, after):
            break
        large[each, place] = after.unflatten(1, (high, -1))
    for row, tokens in enumerate(after.tolist()):
        for node, (o, token) in enumerate(zip(blocks[row], tokens, strict=True)):
            if free[row][node]:
                state.images[row].drafted_codes[o] = DraftedCode(
                    token, scores=distribution.scores[row, node]
                )


def block_of(state: UpsampledState, row: int) -> list[int]:
    """Offsets of the codes of an image's newest block."""
    high = state.grid.height // state.small.height
    stop = max(state.images[row].num_blocks, 1) * high
    places = product(range(stop - high, stop), range(state.grid.width))
    return [state.grid.offset_of(*place) for place in places]


def _redraw(context: Context, state: UpsampledState, scores: Scores, round_: Round) -> None:
    """Draw one code in every island but the first, which the verifier has drawn."""
    fronts = [
        () if over else chain.fronts
        for chain, over in zip(state.chains, round_.finished, strict=True)
    ]
    for image, codes in zip(
        state.images,
        draw_codes(fronts, scores, context.noise.shared_keys, is_final=True),
        strict=True,
    ):
        image.drafted_codes.update(codes)
        left = [[offset for offset in part if offset not in codes] for part in image.islands]
        image.islands = [part for part in left if part]


def low_resolution_image(kit: Kit) -> Drafter:
    """A model that generates a smaller grid; plain decoding for a target without images."""
    if not isinstance(kit.shape, RowShape):
        raise ValueError("the grid determines the size of a block; do not give length= or tree=")
    if not kit.target.family.draws_images:
        return NoDraft()
    if kit.sees != "prompt":
        raise ValueError(
            f"MuLo-SD needs a draft model that generates images from the target's prompt, not one "
            f"with sees={kit.sees!r}; give drafter= an image model, and no sees="
        )
    assert kit.drafter is not None
    fine, coarse = kit.target.require_image_family(), kit.drafter.require_image_family()
    ratio = ratio_of(fine, coarse, kit.options["ratio"])
    sampler = build_upsampler(kit, fine, coarse, ratio)
    return UpsampledDrafter(LowResolutionModel(kit.drafter), sampler, coarse.layout, ratio)


def _check_draws(target: Reader, small: Reader) -> None:
    """Raises ValueError for a draft model without images, for a target with them."""
    if target.family.draws_images:
        small.require_image_family()


def _save_extra(drafter: Any, folder: Path) -> None:
    """Save the trained resampler of a drafter with its weights."""
    if isinstance(drafter, UpsampledDrafter) and isinstance(drafter.sampler, TrainedResampler):
        drafter.sampler.model.save_pretrained(folder / FOLDER)


LOW_RESOLUTION = SmallModelKind(
    "model of a smaller image",
    _check_draws,
    _save_extra,
    marker_files=(FOLDER,),
    has_own_codes=True,
)
