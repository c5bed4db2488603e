"""Rules that verify several drafts of one token: what they accept, beside the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmspec.bench.reporting import PointTable, Progress, silent
from mmspec.draft import Kind, Verifier
from mmspec.verifiers.enumeration import expected_accepted
from mmspec.verifiers.greedy_multidraft import GreedyMultiDraft
from mmspec.verifiers.kseq import KSeq
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.sample_and_match import SampleAndMatch
from mmspec.verifiers.spechub import SpecHub
from mmspec.verifiers.transport import acceptance_bound
from mmspec.verifiers.two_step import TwoStep


class Contender(NamedTuple):
    """A rule with the draws that it is exact for, and the most siblings it takes."""

    name: str
    verifier: Verifier
    kind: Kind
    most: int = 8


CONTENDERS = (
    Contender("sample and match", SampleAndMatch(), Kind.IID),
    Contender("spec-infer", Recursive(), Kind.IID),
    Contender("spectr", KSeq(), Kind.IID),
    Contender("two-step", TwoStep(), Kind.IID, 2),
    Contender("sample and match", SampleAndMatch(), Kind.WOR),
    Contender("recursive-rejection", Recursive(), Kind.WOR),
    Contender("spechub", SpecHub(), Kind.HUB, 2),
    Contender("greedy-multi-draft", GreedyMultiDraft(), Kind.HUB),
    Contender("top tokens", Recursive(), Kind.DET),
)


@dataclass(frozen=True)
class RulePoint:
    """Means over all pairs of distributions."""

    rule: str
    drawn: str  # how the drafts are drawn: a `Kind`
    siblings: int
    accepted: float  # probability that one of the drafts is accepted
    bound: float  # the most that a lossless rule can accept of such drafts
    share: float  # accepted / bound

    def flat(self) -> dict[str, object]:
        return vars(self)


@dataclass(frozen=True)
class RuleTable(PointTable):
    """The report of `mmspec bench rules`."""

    vocabulary: int
    pairs: int
    noise: float
    points: list[RulePoint]


def compare_rules(
    vocabulary: int = 6,
    siblings: Sequence[int] = (1, 2, 3),
    pairs: int = 20,
    noise: float = 1.0,
    seed: int = 0,
    progress: Progress = silent,
) -> RuleTable:
    """Enumerate all rules on random pairs; the drafter's scores are the target's plus `noise`."""
    drawn = random_pairs(vocabulary, pairs, noise, seed)
    cases = [(one, k) for k in siblings for one in CONTENDERS if k <= min(one.most, vocabulary)]
    bounds: dict[tuple[Kind, int], float] = {}
    points = []
    for done, (one, k) in enumerate(cases):
        progress("rules", done, len(cases))
        key = (one.kind, k)
        if key not in bounds:
            bounds[key] = sum(acceptance_bound(p, q, k, one.kind) for p, q in drawn) / pairs
        found = sum(expected_accepted(p, q, one.verifier, k, one.kind) for p, q in drawn) / pairs
        share = found / bounds[key]
        points.append(RulePoint(one.name, one.kind.name, k, found, bounds[key], share))
    return RuleTable(vocabulary, pairs, noise, points)


def random_pairs(
    vocabulary: int, pairs: int, noise: float, seed: int
) -> list[tuple[Tensor, Tensor]]:  # (V,) x2 each
    generator = torch.Generator().manual_seed(seed)
    scores, apart = torch.randn(2, pairs, vocabulary, generator=generator, dtype=torch.float64)
    return [*zip((2 * scores).softmax(-1), (2 * scores + noise * apart).softmax(-1), strict=True)]
