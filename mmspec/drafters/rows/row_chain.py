"""Chains of what is known of a picture, gaps and all: what is read, proposed, and drawn behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Keys
from mmspec.draft import Draft, Kind, Reading, Scores, categorical


@dataclass(frozen=True)
class DraftedCode:
    """A code that is not committed yet."""

    token: int
    settled: bool = False  # judged already, or drawn from the target
    scores: Tensor | None = None  # (V,) the distribution it was drawn from; None = without one


@dataclass(frozen=True)
class RowChain:
    """The chain of one batch row."""

    start: int  # new tokens before it
    nodes: tuple[tuple[int, int], ...]  # places behind them, tokens
    sure: int  # how many of the nodes, from the first, stand without a gap
    fronts: tuple[
        tuple[int, int], ...
    ]  # rows of the distribution to draw from, and the offsets to fill


def said(grid: Grid, held: Mapping[int, DraftedCode], offset: int) -> int | None:
    """The token there, if it is known."""
    return held[offset].token if offset in held else grid.forced(offset)


def drafted(
    lines: Sequence[RowChain],
    held: Sequence[Mapping[int, DraftedCode]],
    like: Categorical,
    kind: Kind,
) -> Draft:
    """The chains of all rows as one draft; `like` (B, 0) is a distribution over the target's vocabulary.

    A code without a distribution of its own and a forced token are point masses; what stands behind
    a gap is read and is no proposal.
    """
    width, device = max(len(line.nodes) for line in lines), like.scores.device
    nodes = [[*line.nodes, *[(0, 0)] * (width - len(line.nodes))] for line in lines]
    places = torch.tensor(nodes, device=device)  # (B, N, 2)
    sure = torch.tensor([[line.sure] for line in lines], device=device)
    mask = torch.arange(width, device=device) < sure
    scores = like.scores.new_zeros(len(lines), width, like.size)
    for row, line in enumerate(lines):
        for node, (place, token) in enumerate(line.nodes[: line.sure]):
            code = held[row].get(line.start + place)
            if code is None or code.scores is None:
                scores[row, node] = -torch.inf
                scores[row, node, token] = 0
            else:
                scores[row, node] = code.scores
    draft = Draft.chain(places[..., 1], kind, Categorical(scores, like.hard), mask)
    return replace(draft, reading=Reading(ahead=places[..., 0]))


def drawn(
    fronts: Sequence[Sequence[tuple[int, int]]],
    scores: Scores,
    keys: Callable[[Tensor], Keys],
    settled: bool,
) -> list[dict[int, DraftedCode]]:
    """By offset, one code for every front of each batch row, drawn with `keys` of its position."""
    width = max(map(len, fronts))
    if not width:
        return [{} for _ in fronts]
    index = [[place for place, _ in line] + [0] * (width - len(line)) for line in fronts]
    place = torch.tensor(index, device=scores.position.device)  # (B, F) rows of the distribution
    distribution = categorical(scores.distribution)[
        torch.arange(len(index), device=place.device)[:, None], place
    ]
    tokens = distribution.sample(keys(scores.position.gather(1, place))).tolist()
    return [
        {
            offset: DraftedCode(tokens[row][step], settled, distribution.scores[row, step])
            for step, (_, offset) in enumerate(line)
        }
        for row, line in enumerate(fronts)
    ]
