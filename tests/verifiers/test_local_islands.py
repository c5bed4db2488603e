"""Cells are tested independently; rejected ones take their surroundings along."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.codes.codebook import Codebook
from mmspec.codes.connected_cells import Cells
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Rule, Scores
from mmspec.verifiers.coupled import target_tokens
from mmspec.verifiers.distances import total_variation
from mmspec.verifiers.local_islands import LocalIslands
from mmspec.verifiers.neighbourhood_threshold import NeighbourhoodThreshold
from mmspec.verifiers.walk import one_hot

SIZE, HEIGHT, WIDTH = 6, 2, 4
NODES = HEIGHT * WIDTH
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Unless:
    """Rejects one token."""

    token: int
    lossless: ClassVar[bool] = False

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:
        return (x != self.token).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


def draft(rows: list[list[int]], settled: tuple[int, ...] = ()) -> Draft:
    """Two rows of four cells, all but some to be tested."""
    cells = torch.tensor([divmod(node, WIDTH) for node in range(NODES)])
    cells[list(settled)] = -1
    tokens = torch.tensor(rows)
    made = Draft.chain(tokens, Kind.DET, None, torch.ones_like(tokens, dtype=torch.bool))
    return replace(made, extras=Cells(cells.expand(len(rows), -1, -1)))


def scores(batch: int, seed: int = 0) -> Scores:
    logits = 2 * torch.randn(batch, NODES + 1, SIZE, generator=torch.Generator().manual_seed(seed))
    position = 5 + torch.arange(NODES + 1).expand(batch, -1)
    return Scores(Categorical(logits), position)


def judge(rule: Rule, given: Draft, reach: float = 1) -> tuple[list[int], list[list[int]], Tensor]:
    """Committed nodes, rejected nodes, and the target's next tokens."""
    said, noise = scores(given.batch), KeyedNoise.from_seed(3, given.batch, CPU)
    verdict = LocalIslands(rule, reach).verify(given, said, noise)
    own = target_tokens(given, said, noise)
    assert verdict.next is not None
    assert torch.equal(verdict.next, own.gather(1, verdict.length[:, None])[:, 0])
    for path, length in zip(verdict.path.tolist(), verdict.length.tolist(), strict=True):
        assert path == [*range(length), *[-1] * (NODES - length)]
    assert verdict.resample_mask is not None
    failed = [row.nonzero()[:, 0].tolist() for row in verdict.resample_mask]
    return verdict.length.tolist(), failed, verdict.next


def test_refused_cells_take_their_surroundings_along() -> None:
    """The rule rejects token 5; nothing is rejected in the second row of the batch."""
    rule = Unless(5)
    rows = [[0, 0, 0, 0, 0, 0, 0, 5], [0] * NODES]
    assert judge(rule, draft(rows))[:2] == ([2, NODES], [[2, 3, 6, 7], []])
    assert judge(rule, draft(rows), reach=0)[:2] == ([7, NODES], [[7], []])
    assert judge(rule, draft(rows), reach=math.inf)[:2] == ([0, NODES], [[*range(NODES)], []])


def test_settled_cells_are_kept_unasked() -> None:
    rule = Unless(5)
    rows = [[5, 0, 0, 0, 0, 5, 0, 0]]
    assert judge(rule, draft(rows, settled=(0, 1, 5)))[:2] == ([NODES], [[]])
    assert judge(rule, draft(rows, settled=(0, 1)))[:2] == ([2], [[2, 4, 5, 6]])
    gap = replace(draft(rows, settled=(0, 1, 5)), mask=torch.arange(NODES)[None] < 3)
    assert judge(rule, gap)[0] == [3]


def test_the_threshold_from_nothing_to_everything() -> None:
    table = Codebook.from_offset(torch.randn(SIZE, 2)).neighbours(2)
    given = draft(torch.randint(SIZE, (40, NODES)).tolist())
    assert judge(NeighbourhoodThreshold(table, 1, 0.0), given)[0] == [NODES] * 40
    none, all_of_them, _ = judge(NeighbourhoodThreshold(table, 1, 1.1), given)
    assert none == [0] * 40
    assert all_of_them == [[*range(NODES)]] * 40
    kept = judge(NeighbourhoodThreshold(table, 1, 0.4), given, reach=0)[1]
    distribution, around = scores(40).distribution, table.lookup(given.tokens, 1)[0][..., 0]
    assert isinstance(distribution, Categorical)
    mass = distribution.probs[:, :-1].gather(-1, torch.stack((given.tokens, around), -1)).sum(-1)
    assert kept == [row.nonzero()[:, 0].tolist() for row in mass < 0.4]


def test_the_distance_of_what_is_committed_is_reported() -> None:
    given, said = draft([[0, 1, 2, 3, 5, 0, 1, 2]]), scores(1)
    noise = KeyedNoise.from_seed(0, 1, CPU)
    assert isinstance(said.distribution, Categorical)
    p = said.distribution.probs
    verdict = LocalIslands(Unless(5), 0).verify(given, said, noise)
    assert int(verdict.length) == 4
    assert verdict.excess is not None
    assert_close(verdict.excess, 4 - p[:, range(4), range(4)].sum(1))
    mixed = 0.5 * one_hot(given.tokens, p) + 0.5 * p[:, :-1]
    known = LocalIslands(Unless(5), 0).verify(
        replace(given, distribution=Categorical.from_weights(mixed)), said, noise
    )
    assert known.excess is not None
    total, weight = torch.zeros(1), torch.ones(1)
    for x in range(SIZE):  # the mean of what one token tells is the total variation
        first = replace(draft([[x, *[0] * 7]]), mask=torch.arange(NODES)[None] < 1)
        mix = 0.5 * one_hot(torch.full((1, NODES), 2), p) + 0.5 * p[:, :-1]
        told = LocalIslands(Unless(9)).verify(
            replace(first, distribution=Categorical.from_weights(mix)), said, noise
        )
        assert told.excess is not None
        total, weight = total + mix[0, 0, x] * told.excess, weight - mix[0, 0, x]
    assert_close(weight, torch.zeros(1), atol=1e-6, rtol=0)
    assert_close(total, total_variation(p[:, 0], mix[:, 0]))


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="reach=-1 is not a distance"):
        LocalIslands(Unless(0), -1)
    blind = replace(draft([[0] * NODES]), extras=None)
    with pytest.raises(ValueError, match="needs the grid positions"):
        LocalIslands(Unless(0)).verify(blind, scores(1), KeyedNoise.from_seed(0, 1, CPU))
    empty = LocalIslands(Unless(0)).verify(
        Draft.empty(1, CPU),
        replace(scores(1), distribution=scores(1).distribution[:, :1]),
        KeyedNoise.from_seed(0, 1, CPU),
    )
    assert int(empty.length) == 0
