"""Verification skipping: some drafts are accepted in part without verification (VVS)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mmspec.codes.codebook import Codebook
from mmspec.distributions.noise import Lane
from mmspec.draft import Draft, Gate, Verdict
from mmspec.targets.tokens.context import Context

PATH_LANE = Lane.OTHER + 4  # the noise lane of path samples
DECAY = 0.9  # weight of each step of a path relative to the one before


class Policy(Protocol):
    """Whether to skip verification this round; one decision for all rows, which share a forward."""

    def should_skip(self, context: Context, draft: Draft) -> bool: ...


@dataclass(frozen=True)
class SkipNever:
    """Every draft is verified."""

    def should_skip(self, context: Context, draft: Draft) -> bool:
        return False


@dataclass(frozen=True)
class SkipUniformly:
    """One round in `interval` is skipped."""

    interval: int = 5

    def __post_init__(self) -> None:
        if self.interval < 2:
            raise ValueError(
                f"interval={self.interval} would skip every round; give 2 (every second round) "
                "or more"
            )

    def should_skip(self, context: Context, draft: Draft) -> bool:
        return context.noise.round % self.interval == 1


@dataclass(frozen=True, eq=False)
class SkipSimilar:
    """Skip if the paths of the draft have similar codes, so that the choice matters little.

    The similarity is the mean over pairs of paths, every second path counting, of the cosine
    between their codes, step by step, each step weighted 0.9 of the one before. Every row must
    reach `threshold`. A chain has no pairs and is verified.
    """

    codebook: Codebook
    threshold: float = 0.7

    def __post_init__(self) -> None:
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} is not a cosine; give one within [-1, 1]")

    def should_skip(self, context: Context, draft: Draft) -> bool:
        tokens = draft.tokens.tolist()
        rows = zip(paths(draft), tokens, context.finished, strict=True)
        found = [
            self.mean_similarity([[text[node] for node in path] for path in row[::2]])
            for row, text, finished in rows
            if not finished
        ]
        return min(found, default=-1.0) >= self.threshold

    def mean_similarity(self, lines: Sequence[Sequence[int]]) -> float:
        """Mean weighted cosine over all pairs of token paths; -1 where there is no pair."""
        if len(lines) < 2:
            return -1.0
        depth = max(map(len, lines))
        codes = torch.full((len(lines), depth), -1)
        for place, line in enumerate(lines):
            codes[place, : len(line)] = self.codebook.codes[list(line)]
        vectors = self.codebook.vectors[codes.clamp_min(0).to(self.codebook.vectors.device)]
        unit = torch.nn.functional.normalize(vectors.float(), dim=-1).cpu()
        cosine = torch.einsum("idw,jdw->ijd", unit, unit)
        real = codes >= 0
        weight = (real[:, None] & real) * DECAY ** torch.arange(depth)
        pairs = (cosine * weight).sum(-1) / weight.sum(-1).clamp_min(torch.finfo().tiny)
        first, second = torch.triu_indices(len(lines), len(lines), 1)
        return float(pairs[first, second].mean())


@dataclass(frozen=True)
class Skipping(Gate):
    """A gate that accepts the beginning of a random path of the draft if `policy` skips a round.

    Dong et al. 2026 (VVS). The path is sampled uniformly per row and cut to the mean length of the
    row's paths; the target reads it together with the next draft, so its cache and distributions
    are those of the text again. Never twice in a row, nor before a row has more than `warm_up` new
    tokens. Lossy: accepted tokens have the drafter's distribution, and in a tree of likely tokens
    not even that. Unlike the published code it does not count rounds by image rows.
    """

    policy: Policy
    warm_up: int = 5

    def skip(self, context: Context, draft: Draft) -> Verdict | None:
        alive = [row for row, finished in enumerate(context.finished) if not finished]
        early = any(context.num_generated(row) <= self.warm_up for row in alive)
        if (
            early
            or context.num_unverified_rounds
            or not draft.nodes
            or not self.policy.should_skip(context, draft)
        ):
            return None
        once = torch.zeros(1, dtype=torch.int64, device=context.device)
        chance = context.noise.fresh_keys(PATH_LANE, once).uniform()[:, 0].tolist()
        taken = [_head(row, where) for row, where in zip(paths(draft), chance, strict=True)]
        if not all(taken[row] for row in alive):
            return None
        depth = max(map(len, taken))
        path = [[*line, *[-1] * (depth - len(line))] for line in taken]
        length = torch.tensor([len(line) for line in taken], device=context.device)
        return Verdict(torch.tensor(path, device=context.device), length, None)


def paths(draft: Draft) -> list[list[list[int]]]:
    """Per row, the nodes from the context to each leaf; one empty path where there is no node."""
    found = []
    for parents, real in zip(draft.parents.tolist(), draft.mask.tolist(), strict=True):
        lines: dict[int, list[int]] = {-1: []}
        for node, parent in enumerate(parents):
            if real[node]:
                lines[node] = [*lines[parent], node]
        inner = {parents[node] for node in lines if node >= 0}
        found.append([line for node, line in lines.items() if node not in inner])
    return found


def _head(lines: Sequence[list[int]], chance: float) -> list[int]:
    """One of the paths, cut to their mean length."""
    mean = sum(map(len, lines)) // len(lines)
    return lines[int(chance * len(lines))][:mean]
