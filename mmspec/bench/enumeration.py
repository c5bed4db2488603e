"""Proof by enumeration: the output distribution of a verifier against the target's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.draft import Kind, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.enumeration import Table, ancestral_joint, enumerate_joint

TOLERANCE = 1e-12
VECTORS = (  # p, q: the oracle vectors of the verifiers' tests
    ((1 / 2, 3 / 10, 1 / 5), (1 / 5, 1 / 2, 3 / 10)),
    ((0.40, 0.35, 0.15, 0.10), (0.10, 0.20, 0.40, 0.30)),
    ((0.1, 0.2, 0.7), (0.6, 0.3, 0.1)),
    ((0.60, 0.25, 0.10, 0.05), (0.30, 0.40, 0.20, 0.10)),
)


@dataclass(frozen=True)
class EnumerationResult:
    """Largest error over all cases, and largest distance of the first two tokens' distribution."""

    cases: int
    error: float
    distance: float  # total variation
    kinds: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return self.error <= TOLERANCE


def enumerate_verifier(
    verifier: Verifier, kinds: tuple[Kind, ...], size: int | None = None
) -> EnumerationResult:
    """Enumerate every draft, decision and correction on chains and small trees.

    `size` is the vocabulary size of the verifier, None = any. Raises ValueError where the noise
    cannot be enumerated.
    """
    cases, error, distance = 0, 0.0, 0.0
    counted = tuple(kind for kind in kinds if kind is not Kind.RACE)
    if not counted:
        raise ValueError("it only takes race drafts, whose noise cannot be enumerated")
    for kind in counted:
        for tree in _trees(verifier, kind):
            for p, q in _distributions(tree, size):
                found = enumerate_joint(p, q, verifier, tree, kind)
                expected = ancestral_joint(p, tree.depth + 1)
                error = max(error, float((found - expected).abs().max()))
                beyond = tuple(range(2, found.dim()))
                gap = (found - expected).sum(beyond) if beyond else found - expected
                distance = max(distance, float(gap.abs().sum() / 2))
                cases += 1
    return EnumerationResult(cases, error, distance, tuple(kind.name for kind in counted))


def _trees(verifier: Verifier, kind: Kind) -> list[Tree]:
    chains = [Tree.chain(1), Tree.chain(2), Tree.chain(3)]
    if not verifier.uses_trees:
        return chains
    return [*chains, Tree.branching([2]), Tree.branching([2, 1])]


def _distributions(tree: Tree, size: int | None) -> Iterator[tuple[Table, Table]]:
    for p, q in VECTORS:
        if (tree.nodes < 4 or len(p) < 4) and size in (None, len(p)):
            yield torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    for seed in range(4):
        yield _by_prefix(seed, size or 3), _by_prefix(1000 + seed, size or 3)


def _by_prefix(seed: int, size: int) -> Callable[[tuple[int, ...]], Tensor]:
    """Return random distributions that depend on the whole prefix and contain zeros."""

    def at(prefix: tuple[int, ...]) -> Tensor:
        draw = random.Random(f"{seed} {prefix}")
        weights = [draw.choice((0, 1, 2, 3, 5)) for _ in range(size)]
        weights[draw.randrange(size)] += 1
        return torch.tensor(weights, dtype=torch.float64) / float(sum(weights))

    return at
