"""Whole denoising chains through the real loop, real drafters, an exact denoiser.

The committed states of a lossless verifier, each measured from the target's mean at the one before
it, are independent standard normals. That is tested directly (with thousands of chains, one step
after another and in pairs of neighbours) and has more power than comparing samples; these are
compared too, with plain sampling under another seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mmspec.decode import Parts, decode
from mmspec.distributions.kernels import GaussianKernel
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Drafter, Kind, Round, Scores, Verifier
from mmspec.drafters.denoising.frozen import Frozen, Prefetch
from mmspec.drafters.denoising.picard import Picard
from mmspec.drafters.denoising.unroll import unroll
from mmspec.drafters.denoising.window import Progress, Window
from mmspec.drafters.plain import NoDraft
from mmspec.targets.continuous.denoising import ChainRequest, ChainTarget, Trajectory
from mmspec.targets.stop import Stop
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.gaussian_block import GaussianBlock
from mmspec.verifiers.gaussian_ratio import GaussianRatio
from mmspec.verifiers.reflection import Reflection
from mmspec.verifiers.sequence import Sequence
from mmspec.verifiers.tolerance_window import ToleranceWindow
from tests.chains import mixture, vp_grid
from tests.covering import exhaustive, limited
from tests.verifiers.gaussian_rounds import RoundOutcome, check_joint, check_normal

DATA = mixture(d=2, components=3, seed=0)
STEPS = 12
KERNEL = GaussianKernel.ancestral(*vp_grid(STEPS))
DENOISER = DATA.denoiser(KERNEL)
ROWS = 2_000
FIVE = Window.constant(5)


@dataclass(frozen=True)
class Chains:
    """All states of all rows, and the increments that made them."""

    states: Tensor  # (B, N + 1, d)
    increments: Tensor  # (B, N - 1, d): the last step draws no noise
    calls: int
    accepted: float  # mean per draft


def sample(drafter: Any, verifier: Verifier, seed: int = 0, rows: int = ROWS) -> Chains:
    """Run `rows` chains at once."""
    noise = KeyedNoise.from_seed(seed, rows, torch.device("cpu"))
    start = noise.shared_keys(torch.zeros(rows, 1, dtype=torch.int64)).normal(2)[:, 0]
    parts = Parts(ChainTarget(DENOISER), drafter, verifier, Stop(STEPS))
    found: list[list[Tensor]] = [[state] for state in start]
    calls, accepted, drafts = 0, 0, 0
    for kept in decode(parts, ChainRequest(start, noise)):
        assert kept.fallback is None, kept.fallback
        calls += kept.calls
        for row, tokens in enumerate(kept.tokens):
            found[row] += tokens
        accepted += sum(kept.accepted)
        drafts += sum(count > 0 for count in kept.drafted)
    states = torch.stack([torch.stack(row) for row in found])
    return Chains(states, increments(states), calls, accepted / max(drafts, 1))


def increments(states: Tensor) -> Tensor:
    """(x' - m(x)) / s; checks that the last state is the mean itself."""
    x, step = states[:, :-1], torch.arange(STEPS).expand(len(states), -1)
    clean = DENOISER.predict(x.flatten(0, 1), step.flatten(), step.flatten()).clean
    mean = KERNEL.mean(x, clean.view_as(x), step)
    gap = states[:, 1:] - mean
    assert bool((gap[:, -1].abs() < 1e-5).all())
    return gap[:, :-1] / KERNEL.std_at(step, x)[:, :-1]


def check_chains(chains: Chains) -> None:
    """Every step's increment is standard normal, and independent of the next one's."""
    steps = chains.increments.shape[1]
    for axis in range(2):
        check_normal(chains.increments[..., axis].flatten(), "all steps")
        for step in range(steps):
            check_normal(chains.increments[:, step, axis], f"step {step}")
        pairs = torch.stack([chains.increments[:, :-1, axis], chains.increments[:, 1:, axis]], -1)
        whole = RoundOutcome(pairs.flatten(0, 1)[..., None], torch.empty(0), pairs, pairs)
        check_joint(whole, cells=12)


LOSSLESS: dict[str, tuple[Drafter, Verifier]] = {
    "reflection": (Frozen(FIVE), Reflection()),
    "reflection, prefetch, fresh noise": (
        Frozen(FIVE, root=Prefetch(), kind=Kind.IID),
        Reflection(),
    ),
    "reflection, carried window": (Picard(FIVE), Reflection()),
    "ratio": (Frozen(FIVE), GaussianRatio()),
    "sequence, tree": (Frozen(Window.tree((2, 2))), Sequence()),
    "block": (Frozen(FIVE, kind=Kind.IID), GaussianBlock()),
}


@pytest.mark.parametrize("name", limited(exhaustive(LOSSLESS, [*LOSSLESS][::2]), 2))
def test_chains_are_those_of_the_target(name: str) -> None:
    drafter, verifier = LOSSLESS[name]
    chains = sample(drafter, verifier)
    check_chains(chains)
    assert 0.5 < chains.accepted < 4


@pytest.fixture(scope="module")
def plain() -> Chains:
    return sample(NoDraft(), Reflection())


def test_plain_sampling_passes_as_well(plain: Chains) -> None:
    assert plain.calls == STEPS
    check_chains(plain)


@dataclass(frozen=True)
class Reusing(Drafter):
    """Wrong under shared noise: guesses a state by the refused one that stood in its place.

    That one knows the noise which drives the guess, unless every round has noise of its own.
    """

    kind: Kind
    sees: ClassVar[str] = "target-memory"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (self.kind,)

    def begin(self, context: Trajectory) -> Tensor:
        return context.state

    def propose(self, context: Trajectory, guess: Tensor) -> Draft:
        levels = context.max_draft_lengths(2)

        def distribution(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            std = KERNEL.std_at(step, x)
            mean = KERNEL.mean(x, context.known.prediction.clean[:, None], step)
            if depth == 0:
                mean = mean + (guess[:, None] - mean).clamp(-std, std)
            return mean, std

        return unroll(context, FIVE.topology(max(levels)), levels, distribution, self.kind)

    def observe(
        self, context: Trajectory, state: Tensor, draft: Draft, scores: Scores, kept: Round
    ) -> Tensor:
        return scores.features["state"][:, -1]


@pytest.mark.parametrize("kind", limited([Kind.RACE, Kind.IID], 1))
def test_refused_states_may_be_used_with_new_noise_only(kind: Kind) -> None:
    chains = sample(Reusing(kind), Reflection())
    if kind is Kind.IID:
        check_chains(chains)
        return
    with pytest.raises(AssertionError, match="by chance"):
        check_chains(chains)


def test_samples_have_the_moments_and_weights_of_plain_sampling(plain: Chains) -> None:
    """Two samples of 2000: a weight that is off by 0.08, or a mean by 0.17 of a standard deviation,
    is found with probability 0.9; the false-alarm rate is 1e-4 in each of the seven comparisons.
    """
    most = 3.9
    final = sample(Frozen(FIVE), Reflection(), seed=1).states[:, -1]
    weights = [DATA.component(x).bincount(minlength=3) / ROWS for x in (final, plain.states[:, -1])]
    error = (2 * weights[1] * (1 - weights[1]) / ROWS).sqrt()
    assert bool(((weights[0] - weights[1]).abs() < most * error).all())
    for power in (1, 2):
        left, right = final**power, plain.states[:, -1] ** power
        error = ((left.var(0) + right.var(0)) / ROWS).sqrt()
        assert bool(((left.mean(0) - right.mean(0)).abs() < most * error).all())


@dataclass(frozen=True)
class Always:
    """Looks at every state a draft begins at."""

    def rows_to_refresh(self, context: Trajectory, progress: Progress) -> list[bool]:
        return [True] * context.batch


@pytest.mark.parametrize("verifier", [Reflection(), GaussianRatio(), Sequence()])
def test_a_draft_that_is_the_target_s_own_changes_nothing(
    plain: Chains, verifier: Verifier
) -> None:
    drafted = sample(Frozen(Window.constant(2), root=Always()), verifier, rows=50)
    assert drafted.states.equal(plain.states[:50])
    assert drafted.accepted == 1


@pytest.mark.parametrize("drafter", [Frozen(FIVE), Picard(FIVE)])
def test_no_tolerance_is_sequential_sampling(drafter: Drafter) -> None:
    pairs = ((drafter, ToleranceWindow(0.0)), (NoDraft(), Coupled()))
    drafted, plain = (sample(d, v, rows=200) for d, v in pairs)
    assert drafted.states.equal(plain.states)
