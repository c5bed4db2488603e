"""One round of a verifier on many rows at once, and the statistical tests of its states.

For any draft, the output states, measured from the target's mean in standard deviations, must be
independent standard normals. This is equivalent to losslessness. Acceptance and coupling are tested
separately, because a verifier that always samples again passes it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.distributions.gaussian import DrivingNoise, Gaussian
from mmspec.distributions.noise import KeyedNoise, Lane
from mmspec.draft import Draft, Kind, Scores, Verifier
from mmspec.trees import Tree

Mean = Callable[[Tensor], Tensor]  # (..., d) -> (..., d)
ALPHA = 1e-4  # chance that a right verifier fails one of the tests of distributions below


@dataclass(frozen=True)
class Case:
    """Means and standard deviations of both distributions; a chain of `depth` steps, or a tree."""

    p: Mean
    q: Mean
    std: float = 0.7
    draft_std: float | None = None  # as `std` unless given
    tree: Tree = Tree.chain(1)  # noqa: RUF009
    d: int = 1
    kind: Kind = Kind.RACE  # IID = noise of the round
    ragged: bool = False  # rows draft 0, 1, 2 .. states of the chain

    def unit(self) -> Tensor:  # (d,)
        """From the draft's mean to the target's, at the origin."""
        gap = self.p(torch.zeros(self.d)) - self.q(torch.zeros(self.d))
        return torch.nn.functional.normalize(gap, dim=0)

    def across(self) -> Tensor:  # (d,)
        """A direction orthogonal to that."""
        turned = torch.zeros(self.d)
        turned[0], turned[1] = self.unit()[1], -self.unit()[0]
        return torch.nn.functional.normalize(turned, dim=0)


def apart(r: float, d: int, *, width: int = 1, at: float = 0.0, std: float = 0.7) -> Case:
    """One step whose means are `r` standard deviations apart, in a slanted direction."""
    unit = torch.linspace(1.0, 2.0, d)
    shift = r * std * unit / unit.norm()
    return Case(
        p=lambda x: torch.full_like(x, at),
        q=lambda x: torch.full_like(x, at) - shift,
        std=std,
        tree=Tree.branching([width]),
        d=d,
        kind=Kind.RACE if width == 1 else Kind.IID,
    )


@dataclass(frozen=True)
class RoundOutcome:
    """The result per row, continued by the target to one state after the deepest draft."""

    increments: Tensor  # (n, D + 1, d), (x - m_p) / s
    length: Tensor  # (n,)
    drafted: Tensor  # (n, N, d)
    following: Tensor  # (n, d)


def play(verifier: Verifier, case: Case, n: int, seed: int = 0) -> RoundOutcome:
    """Draft from the origin, verify, and continue with the target."""
    generator = torch.Generator().manual_seed(seed)
    noise = KeyedNoise(torch.randint(-(2**62), 2**62, (n,), generator=generator))
    draft, scores = make_draft(case, noise, n)
    verdict = verifier.verify(draft, scores, noise)
    following = verdict.next
    assert following is not None
    rows, x, found = torch.arange(n), torch.zeros(n, case.d), []
    for level in range(case.tree.depth + 1):
        mean = case.p(x)
        fresh = mean + case.std * torch.randn(n, case.d, generator=generator)
        x = torch.where((verdict.length == level)[:, None], following, fresh)
        if level < case.tree.depth:
            token = draft.tokens[rows, verdict.path[:, level].clamp_min(0)]
            x = torch.where((level < verdict.length)[:, None], token, x)
        found.append((x - mean) / case.std)
    return RoundOutcome(torch.stack(found, 1), verdict.length, draft.tokens, following)


def make_draft(case: Case, noise: KeyedNoise, n: int) -> tuple[Draft, Scores]:
    """A draft of the case, and the target's scores of it."""
    tree, depth = case.tree, torch.tensor(case.tree.depths, dtype=torch.int64)
    position = torch.cat([torch.zeros(1, dtype=torch.int64), depth + 1]).expand(n, -1) + 1
    keys = noise.shared_keys(position[:, :-1] if tree.is_chain else position[:, 1:] - 1)
    if case.kind is Kind.IID:
        keys = noise.fresh_keys(Lane.DRAFT, torch.arange(tree.nodes))
    driving = keys.normal(case.d)
    std = case.std if case.draft_std is None else case.draft_std
    states, means = [torch.zeros(n, case.d)], []
    for node, parent in enumerate(tree.parents):
        means.append(case.q(states[parent + 1]))
        states.append(means[-1] + std * driving[:, node])
    tokens, every = torch.stack(states[1:], 1), torch.stack(states, 1)
    distribution = Gaussian(torch.stack(means, 1), torch.tensor(std), 1)
    scores = Scores(Gaussian(case.p(every), torch.tensor(case.std), 1), position)
    mask = None
    if case.ragged:
        mask = torch.arange(tree.nodes) < (torch.arange(n) % (tree.nodes + 1))[:, None]
    return Draft.from_tree(
        tree, tokens, case.kind, distribution, mask, DrivingNoise(driving)
    ), scores


def check_normal(x: Tensor, what: str) -> None:  # (n,)
    """Kolmogorov-Smirnov against the standard normal."""
    x = x.double().sort().values
    n = len(x)
    grid = torch.arange(n + 1, dtype=torch.float64) / n
    cdf = torch.special.ndtr(x)
    distance = torch.maximum((cdf - grid[:-1]).abs().amax(), (cdf - grid[1:]).abs().amax())
    most = math.sqrt(-0.5 * math.log(ALPHA / 2) / n)
    assert distance < most, f"{what}: distance {distance:.5f}, at most {most:.5f} by chance"


def check_distribution(played: RoundOutcome, case: Case) -> None:
    """The first state, along the line of the means and across it."""
    first = played.increments[:, 0]
    check_normal(first @ case.unit(), "along")
    if case.d > 1:
        check_normal(first @ case.across(), "across")


def check_untouched(played: RoundOutcome, case: Case) -> None:
    """The component orthogonal to the line is independent of rejection (equal deviations)."""
    refused = played.increments[played.length == 0, 0]
    if case.d > 1:
        check_normal(refused @ case.across(), "across, where refused")


def check_joint(played: RoundOutcome, cells: int = 6) -> None:
    """All increments along the first axis at once: chi-square over equally likely boxes."""
    axis = played.increments[..., 0].double()
    place = (torch.special.ndtr(axis) * cells).long().clamp(0, cells - 1)
    places = place.shape[1]
    index = (place * cells ** torch.arange(places)).sum(-1)
    count = index.bincount(minlength=cells**places).double()
    expected = len(index) / cells**places
    statistic = float(((count - expected) ** 2).sum() / expected)
    free = cells**places - 1
    most = _chi_square(free)
    assert statistic < most, f"joint: chi-square {statistic:.0f}, at most {most:.0f} by chance"


def check_acceptance(played: RoundOutcome, expected: float) -> None:
    """The share of rows that kept their first state, within 4.5 standard errors (p = 7e-6)."""
    share, n = float((played.length > 0).double().mean()), len(played.length)
    error = math.sqrt(max(expected * (1 - expected), 1 / n) / n)
    assert abs(share - expected) < 4.5 * error, f"acceptance {share:.4f}, expected {expected:.4f}"


def check_coupling(played: RoundOutcome, case: Case) -> None:
    """A rejected state is moved along the line of the means only."""
    moved = (played.following - played.drafted[:, 0])[played.length == 0]
    moved = moved / case.std
    away = moved - (moved @ case.unit())[:, None] * case.unit()
    shift = case.p(torch.zeros(case.d)) - case.q(torch.zeros(case.d))
    away -= shift / case.std - (shift @ case.unit()) * case.unit() / case.std
    assert away.abs().max() < 1e-3, f"moved across the line by {away.abs().max():.3f}"


BENT = Case(  # means that depend on the state, and come closer and drift apart with it
    p=lambda x: 0.8 * x + 0.5 * torch.sin(2 * x.flip(-1)),
    q=lambda x: 0.6 * x - 0.2,
    tree=Tree.chain(2),
)


def overlap(r: float) -> float:
    """2 Phi(-r / 2): the acceptance of a maximal coupling."""
    return math.erfc(r / math.sqrt(8))


def _chi_square(free: int) -> float:
    """The upper ALPHA quantile (Wilson & Hilferty)."""
    z = float(torch.special.ndtri(torch.tensor(1 - ALPHA, dtype=torch.float64)))
    return float(free * (1 - 2 / (9 * free) + z * math.sqrt(2 / (9 * free))) ** 3)
