"""Blocks from a smaller image: the repaired image equals a slow reference; exact if required."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from mmspec.codes.codebook import Codebook
from mmspec.codes.connected_cells import find_islands
from mmspec.codes.grid import Grid
from mmspec.codes.resampling import LatentResampler
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Drafter, Kind, Verifier
from mmspec.drafters.plain import NoDraft
from mmspec.drafters.rows.low_resolution_model import LowResolutionModel
from mmspec.drafters.rows.partial_image import PartialImage, build_chain
from mmspec.drafters.rows.row_chain import DraftedCode
from mmspec.drafters.rows.upsampled import UpsampledDrafter
from mmspec.recipe import pair
from mmspec.targets.tokens.context import Context
from mmspec.verifiers.block import Block
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.local_islands import LocalIslands
from mmspec.verifiers.neighbourhood_threshold import NeighbourhoodThreshold
from mmspec.verifiers.recursive import Recursive
from tests.covering import covering
from tests.drafters.tables import CPU, TableTarget, sample, z_score

SIZE, RATIO, ROWS = 3, 2, 2000
TALL = Grid(4, 4, (0, SIZE))
RULED = Grid(4, 2, (0, 2), separator=1, header=(1,), footer=(0,))
BOOKS = {
    size: Codebook.from_offset(torch.tensor([[0.0], [1.0], [3.0]])[:size]) for size in (2, SIZE)
}


@dataclass(frozen=True)
class Dice:
    """A stand-in for the small model: rows are a function of the given tokens."""

    size: int

    def begin(self, context: Context, grid: Grid) -> Grid:
        return grid

    def row(self, context: Context, sketch: Grid, given: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([self.predict_row(tokens, sketch.width) for tokens in given])

    def predict_row(self, given: Sequence[int], width: int) -> list[int]:
        seed = sum((2 + place) * (1 + token) for place, token in enumerate(given))
        return [(seed + 2 * column) % self.size for column in range(width)]


@dataclass(frozen=True)
class Likely:
    """Accepts tokens above a probability."""

    tau: float
    lossless: ClassVar[bool] = False

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:
        return (p.prob(x) >= self.tau).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


@dataclass(frozen=True)
class Framed(Drafter):
    """Gives a table's requests a grid."""

    inner: UpsampledDrafter
    grid: Grid
    kinds: tuple[Kind, ...] = (Kind.DET,)

    def begin(self, context: Context) -> Any:
        context.shared["grid"] = self.grid  # type: ignore[index]
        return self.inner.begin(context)

    def propose(self, context: Context, state: Any) -> Any:
        return self.inner.propose(context, state)

    def observe(self, *news: Any) -> Any:
        return self.inner.observe(*news)


@dataclass(frozen=True)
class Guesses:
    """A conditional resampler: logits that depend on the small code and the large codes before."""

    size: int

    def logits(self, small: Tensor, large: Tensor, row: Tensor) -> Tensor:
        batch, _, width = large.shape
        logits = torch.zeros(batch, RATIO, width, self.size)
        for each in range(batch):
            for place in range(RATIO * width):
                down, column = divmod(place, width)
                chain = int(row[each]) * RATIO + down
                seen = large[each].flatten()[: chain * width + column].tolist()
                code = int(small[each, int(row[each]), column // RATIO])
                seed = sum((1 + i) * (1 + token) for i, token in enumerate(seen)) + 7 * code
                logits[each, down, column] = torch.sin(seed * torch.arange(1.0, self.size + 1))
        return logits

    def down(self, tokens: Tensor) -> Tensor:
        return tokens[:, ::RATIO, ::RATIO]


def guesser(grid: Grid, kind: Kind) -> Framed:
    inner = replace(drafter(grid).inner, sampler=Guesses(size_of(grid)))
    assert inner.kinds == (Kind.RACE, Kind.IID)
    return Framed(replace(inner, kind=kind), grid, (kind,))


def size_of(grid: Grid) -> int:
    assert isinstance(grid.codes, tuple)
    return grid.codes[1]


def drafter(grid: Grid) -> Framed:
    size = size_of(grid)

    def layout(height: int, width: int) -> Grid:
        return Grid(height, width, (0, size), grid.separator, grid.header, grid.footer)

    dice, sampler = (
        cast(LowResolutionModel, Dice(size)),
        LatentResampler(BOOKS[size], BOOKS[size], RATIO),
    )
    return Framed(UpsampledDrafter(dice, sampler, layout, RATIO), grid)


def table(grid: Grid) -> TableTarget:
    return TableTarget(size_of(grid), grid.length, seed=3, scale=1.5, grid=grid)


class Reference:
    """MuLo-SD with a dictionary, for one image: every distribution is computed from scratch."""

    def __init__(
        self, target: TableTarget, grid: Grid, tau: float, reach: float, noise: KeyedNoise
    ) -> None:
        self.target, self.grid, self.tau, self.reach = target, grid, tau, reach
        self.noise = noise
        self.known: dict[int, int] = {}
        self.committed = self.calls = self.together = 0  # places drawn by one call

    def distribution(self, offset: int, more: dict[int, int]) -> Tensor:
        """Behind all that is known before a place; what is missing counts as 0."""
        seen = [({**self.known, **more}).get(place, 0) for place in range(offset)]
        row = self.target.row(torch.tensor(offset), torch.tensor(self.target.code(seen)))
        return self.target.logits[row]

    def draw(self, offset: int) -> int:
        keys = self.noise.shared_keys(torch.tensor([[1 + offset]]))
        return int(Categorical(self.distribution(offset, {})[None, None]).sample(keys))

    def first(self) -> int:
        return next(o for o in range(self.grid.length + 1) if o not in self.known)

    def small(self, rows: int) -> list[int]:
        """The small picture of complete rows, spelt."""
        found = list(self.grid.header)
        for row in range(rows // RATIO):
            for column in range(self.grid.width // RATIO):
                square = [
                    self.known[self.grid.offset_of(RATIO * row + down, RATIO * column + aside)]
                    for down in range(RATIO)
                    for aside in range(RATIO)
                ]
                vectors = BOOKS[self.target.size].vectors[:, 0]
                found.append(int((vectors - vectors[square].mean()).abs().argmin()))
            found += [] if self.grid.separator is None else [self.grid.separator]
        return found

    def picture(self) -> list[int]:
        self.known[0] = self.draw(0)
        for top in range(0, self.grid.height, RATIO):
            self.block(top)
        self.calls += self.committed < self.grid.length  # what was kept behind the last drawn code
        ends = {
            o: t for o in range(self.grid.length) if (t := self.grid.forced_token(o)) is not None
        }
        return [({**ends, **self.known})[offset] for offset in range(self.grid.length)]

    def block(self, top: int) -> None:
        grid = self.grid
        row = Dice(self.target.size).predict_row(self.small(top), grid.width // RATIO)
        offsets = [
            grid.offset_of(top + down, c) for down in range(RATIO) for c in range(grid.width)
        ]
        here = [offset for offset in offsets if offset not in self.known]
        more = {offset: row[(grid.cell_at(offset) or (0, 0))[1] // RATIO] for offset in here}
        more |= {o: t for o in range(offsets[-1] + 1) if (t := grid.forced_token(o)) is not None}
        self.calls += 1
        refused = [o for o in here if float(self.distribution(o, more).exp()[more[o]]) < self.tau]
        cells = {o: grid.cell_at(o) for o in here}
        near = [
            one
            for one, cell in cells.items()
            if cell is not None
            and any(
                max(abs(cell[0] - other[0]), abs(cell[1] - other[1])) <= self.reach
                for other in (cells[o] for o in refused)
                if other is not None
            )
        ]
        self.known |= {o: more[o] for o in here if o not in near}
        forced = {o: t for o, t in more.items() if o not in here}
        self.known |= forced
        found = find_islands(cell for one in near if (cell := cells[one]) is not None)
        parts = [[grid.offset_of(*cell) for cell in part] for part in found]
        if not near:
            self.beyond(offsets[-1] + 1)
            return
        self.known[near[0]] = self.draw(near[0])
        self.committed = near[0] + 1
        parts = [[o for o in part if o != near[0]] for part in parts]
        while any(parts):
            self.calls += 1
            self.committed = self.first() + 1
            fronts = [part[0] for part in parts if part and part[0] - 1 in self.known]
            drawn = {o: self.draw(o) for o in fronts}
            self.known |= drawn
            self.together = max(self.together, len(drawn))
            parts = [[o for o in part if o not in drawn] for part in parts]

    def beyond(self, offset: int) -> None:
        """The token that comes with a block kept whole."""
        while (token := self.grid.forced_token(offset)) is not None:
            self.known[offset] = token
            offset += 1
        if offset < self.grid.length:
            self.known[offset] = self.draw(offset)
        self.committed = min(offset + 1, self.grid.length)


@dataclass(frozen=True)
class Mislabelled(Drafter):
    """Labels draws with the target's noise as independent ones."""

    inner: Framed
    kinds: tuple[Kind, ...] = (Kind.IID,)

    def begin(self, context: Context) -> Any:
        return self.inner.begin(context)

    def propose(self, context: Context, state: Any) -> Any:
        draft = self.inner.propose(context, state)
        assert draft.distribution is None or draft.kind is Kind.RACE
        flat = Categorical(torch.zeros(*draft.tokens.shape, 2))
        return replace(draft, kind=Kind.IID, distribution=flat)

    def observe(self, *news: Any) -> Any:
        return self.inner.observe(*news)


GRIDS = [Grid(4, 2, (0, SIZE)), Grid(2, 6, (0, SIZE)), RULED]
NAMES = ["tall", "wide", "ruled"]


@pytest.mark.parametrize(
    ("grid", "limits"),
    covering(GRIDS, ((0.15, 0), (0.15, 1), (0.3, 0), (0.1, math.inf)), strength=1),
    ids=str,
)
def test_the_mended_picture_is_that_of_the_reference(
    grid: Grid, limits: tuple[float, float]
) -> None:
    target, (tau, reach) = table(grid), limits
    verifier, rows = LocalIslands(Likely(tau), reach), 24
    tokens, rounds = sample(target, drafter(grid), verifier, rows, seed=7)
    noise = KeyedNoise.from_seed(7, rows, CPU)
    calls, together = [], []
    for row in range(rows):
        slow = Reference(target, grid, tau, reach, KeyedNoise(noise.rows[row : row + 1]))
        assert tokens[row] == slow.picture(), row
        calls.append(slow.calls)
        together.append(slow.together)
    assert sum(kept.calls for kept in rounds) == max(calls)
    assert max(together) > 1 or reach > 0 or grid.width < 6
    assert min(calls) < max(calls) or reach == math.inf or grid is RULED


@pytest.mark.parametrize("grid", GRIDS, ids=NAMES)
def test_a_threshold_of_nothing_keeps_everything(grid: Grid) -> None:
    target, rule = table(grid), NeighbourhoodThreshold(BOOKS[size_of(grid)].neighbours(1), 1, 0.0)
    tokens, rounds = sample(target, drafter(grid), LocalIslands(rule), 5, seed=2)
    assert sum(kept.calls for kept in rounds) == grid.height // RATIO
    top = [grid.offset_of(0, column) for column in range(1, grid.width)]
    small = Dice(size_of(grid)).predict_row(grid.header, grid.width // RATIO)
    drawn = [code for code in small for _ in range(RATIO)]
    assert all([row[offset] for offset in top] == drawn[1:] for row in tokens)


@pytest.mark.parametrize("grid", GRIDS, ids=NAMES)
def test_a_threshold_beyond_reach_is_plain_decoding(grid: Grid) -> None:
    target, rule = table(grid), NeighbourhoodThreshold(BOOKS[size_of(grid)].neighbours(1), 1, 1.1)
    tokens, rounds = sample(target, drafter(grid), LocalIslands(rule), 30, seed=2)
    assert tokens == sample(target, NoDraft(), Coupled(), 30, seed=2)[0]
    assert all(max(kept.excess or (0.0,)) < 1e-6 for kept in rounds)
    assert len(rounds) <= target.room


PAIRS = Grid(4, 2, (0, 2))


@pytest.mark.exhaustive
def test_exact_verifiers_stay_exact() -> None:
    """Chi-square on all sequences; z > 3 has probability 0.4 % under the right distribution."""
    target = table(PAIRS)
    assert abs(z_score(target, drafter(PAIRS), Recursive(), ROWS)) < 3
    assert z_score(target, drafter(PAIRS), LocalIslands(Likely(0.3)), ROWS) > 30
    for verifier in (Coupled(), Recursive()):
        greedy = sample(target, drafter(PAIRS), verifier, 4, greedy=True)[0]
        assert greedy == sample(target, NoDraft(), Coupled(), 4, greedy=True)[0]
    seeded = sample(target, drafter(PAIRS), Coupled(), 50, seed=4)[0]
    assert seeded == sample(target, NoDraft(), Coupled(), 50, seed=4)[0]


@pytest.mark.exhaustive
def test_codes_drawn_from_distributions_are_exact_too() -> None:
    """Distributions of the same codes drawn otherwise, or with the target's noise, would not be."""
    target = table(PAIRS)
    assert abs(z_score(target, guesser(PAIRS, Kind.IID), Recursive(), ROWS)) < 3
    example = guesser(PAIRS, Kind.RACE)
    wrong = Framed(example.inner, PAIRS, (Kind.IID,))
    assert z_score(target, Mislabelled(wrong), Recursive(), ROWS // 4) > 10
    for kind in (Kind.RACE, Kind.IID):
        seeded = sample(target, guesser(PAIRS, kind), Coupled(), 50, seed=4)[0]
        assert seeded == sample(target, NoDraft(), Coupled(), 50, seed=4)[0]
    for verifier, kind in ((Coupled(), Kind.RACE), (Recursive(), Kind.IID)):
        greedy = sample(target, guesser(PAIRS, kind), verifier, 4, greedy=True)[0]
        assert greedy == sample(target, NoDraft(), Coupled(), 4, greedy=True)[0]


@pytest.mark.parametrize("grid", GRIDS, ids=NAMES)
def test_every_code_is_drawn_behind_those_before_it(grid: Grid) -> None:
    """A threshold of 0 keeps the first draft: draw it again from its final distributions."""
    rule = NeighbourhoodThreshold(BOOKS[size_of(grid)].neighbours(1), 1, 0.0)
    rows, size = 5, size_of(grid)
    target, example = table(grid), guesser(grid, Kind.RACE)
    tokens, _ = sample(target, example, LocalIslands(rule), rows, seed=2)
    noise, made = KeyedNoise.from_seed(2, rows, CPU), torch.tensor(tokens)
    cells = [[grid.offset_of(y, x) for x in range(grid.width)] for y in range(grid.height)]
    large = made[:, torch.tensor(cells)]
    top = Dice(size).predict_row(grid.header, grid.width // RATIO)
    small = torch.tensor([top]).expand(rows, 1, -1)
    distributions = Guesses(size).logits(small, large, torch.zeros(rows, dtype=torch.long))
    offsets = torch.tensor(cells[:RATIO]).flatten()
    keys = noise.shared_keys((1 + offsets).expand(rows, -1))
    drawn = Categorical(distributions.flatten(1, 2)).sample(keys)
    assert torch.equal(
        drawn[:, 1:], large[:, :RATIO].flatten(1)[:, 1:]
    )  # the first is the target's


@pytest.mark.exhaustive
def test_exact_verifiers_stay_exact_on_many_rows() -> None:
    assert abs(z_score(table(PAIRS), drafter(PAIRS), Recursive(), 40_000, seed=1)) < 3


def drafted_codes(grid: Grid, codes: str) -> dict[int, DraftedCode]:
    """An image row by row: letters are known codes."""
    return {
        grid.offset_of(row, column): DraftedCode(ord(letter), True)
        for row, chain in enumerate(codes.split())
        for column, letter in enumerate(chain)
        if letter.isalpha()
    }


def test_the_block_is_in_raster_order_with_gaps() -> None:
    """Two rounds of the example in the module docstring."""
    grid = Grid(2, 6, (0, 300))
    image = PartialImage(1, drafted_codes(grid, "...def g..j.."), [[2, 7, 8], [10, 11]])
    image.drafted_codes = {o: one for o, one in image.drafted_codes.items() if o >= 2}
    chain = build_chain(grid, image, 2, 2)
    assert [(place + 2, chr(token)) for place, token in chain.nodes] == [
        *((3, "d"), (4, "e"), (5, "f"), (6, "g"), (9, "j"))
    ]
    assert (chain.num_contiguous, chain.fronts) == (0, ((5, 10),))
    image.islands = [[2, 7, 8], [9, 10]]  # the second one begins behind an unknown token
    del image.drafted_codes[9]
    assert build_chain(grid, image, 2, 2).fronts == ()
    assert build_chain(grid, image, 2, 2).nodes == ()
    image.islands = [[7, 8]]
    image.drafted_codes = drafted_codes(grid, "abcdef g..jkl")
    chain = build_chain(grid, image, 2, 5)
    assert ([place for place, _ in chain.nodes], chain.num_contiguous, chain.fronts) == (
        [0, 1],
        2,
        (),
    )


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="3 x 4 cannot be made 2 times smaller"):
        drafter(TALL).inner.small_grid(Grid(3, 4, (0, 2)))
    looks: Verifier = Block()
    with pytest.raises(ValueError, match="decides about a token by looking at later ones"):
        pair(drafter(TALL).inner, looks, cast(Any, None))
