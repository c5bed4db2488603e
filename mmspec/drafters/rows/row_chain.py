"""Chains of the known codes of an image, with gaps: what is read, proposed and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import Keys
from mmspec.draft import Draft, Kind, NodeInputs, Scores


@dataclass(frozen=True)
class DraftedCode:
    """A code that is not committed yet."""

    token: int
    is_final: bool = False  # verified, or drawn from the target
    scores: Tensor | None = None  # (V,) distribution it was drawn from; None = none


@dataclass(frozen=True)
class RowChain:
    """The chain of one batch row."""

    start: int  # new tokens before it
    nodes: tuple[tuple[int, int], ...]  # positions after them, tokens
    num_contiguous: int  # leading nodes without a gap
    fronts: tuple[
        tuple[int, int], ...
    ]  # rows of the distribution to draw from, and the offsets to fill


def known_token(grid: Grid, drafted_codes: Mapping[int, DraftedCode], offset: int) -> int | None:
    """The token at an offset, if it is known."""
    return drafted_codes[offset].token if offset in drafted_codes else grid.forced_token(offset)


def build_draft(
    chains: Sequence[RowChain],
    drafted_codes: Sequence[Mapping[int, DraftedCode]],
    like: Categorical,
    kind: Kind,
) -> Draft:
    """The chains of all rows as one draft; `like` (B, 0) has the target's vocabulary.

    A code without a distribution and a forced token are point masses; nodes after a gap are read
    but are not proposals.
    """
    width, device = max(len(chain.nodes) for chain in chains), like.scores.device
    nodes = [[*chain.nodes, *[(0, 0)] * (width - len(chain.nodes))] for chain in chains]
    places = torch.tensor(nodes, device=device)  # (B, N, 2)
    num_contiguous = torch.tensor([[chain.num_contiguous] for chain in chains], device=device)
    mask = torch.arange(width, device=device) < num_contiguous
    scores = like.scores.new_zeros(len(chains), width, like.size)
    for row, chain in enumerate(chains):
        for node, (place, token) in enumerate(chain.nodes[: chain.num_contiguous]):
            code = drafted_codes[row].get(chain.start + place)
            if code is None or code.scores is None:
                scores[row, node] = -torch.inf
                scores[row, node, token] = 0
            else:
                scores[row, node] = code.scores
    draft = Draft.chain(places[..., 1], kind, Categorical(scores, like.hard), mask)
    return replace(draft, node_inputs=NodeInputs(relative_positions=places[..., 0]))


def draw_codes(
    fronts: Sequence[Sequence[tuple[int, int]]],
    scores: Scores,
    keys: Callable[[Tensor], Keys],
    is_final: bool,
) -> list[dict[int, DraftedCode]]:
    """By offset, one code for every front of each batch row, drawn with the `keys` of positions."""
    width = max(map(len, fronts))
    if not width:
        return [{} for _ in fronts]
    index = [[place for place, _ in chain] + [0] * (width - len(chain)) for chain in fronts]
    place = torch.tensor(index, device=scores.position.device)  # (B, F) rows of the distribution
    distribution = as_categorical(scores.distribution)[
        torch.arange(len(index), device=place.device)[:, None], place
    ]
    tokens = distribution.sample(keys(scores.position.gather(1, place))).tolist()
    return [
        {
            offset: DraftedCode(tokens[row][step], is_final, distribution.scores[row, step])
            for step, (_, offset) in enumerate(chain)
        }
        for row, chain in enumerate(fronts)
    ]
