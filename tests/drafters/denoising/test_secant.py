"""Secants on a carried window: the correction by hand, the distribution of chains, the calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.distributions.kernels import GaussianKernel
from mmspec.drafters.denoising.frozen import Refresh
from mmspec.drafters.denoising.picard import Picard
from mmspec.drafters.denoising.secant import DAMPING, Secant, SecantState, Slots, align
from mmspec.drafters.denoising.window import Mismatch, Window
from mmspec.targets.continuous.denoising import Prediction
from tests.chains import vp_grid
from tests.drafters.denoising.toy_chains import (
    Steep,
    Varying,
    denoiser,
    distance,
    plain,
    run,
    surprise,
)

KERNEL = GaussianKernel.ancestral(*vp_grid(12))
STEEP = Steep(KERNEL)
SIX = Window.constant(6)


def make_slots(moved: Tensor, slopes: Tensor) -> Slots:  # (K, d) x2
    """One row of steps whose predictions are 1 at state 0, with secants of c = slopes * x."""
    none, known = torch.zeros(1, *moved.shape), torch.ones(1, len(moved), dtype=torch.bool)
    return Slots([0], none, none + 1, moved[None], (slopes * moved)[None], known)


def test_a_secant_gives_the_change_along_it_and_the_slope_across() -> None:
    line = torch.tensor([[3.0, 0.0, 0.0]])
    slots = make_slots(line, torch.tensor([[0.5, 0.0, 0.0]]))
    x = torch.tensor([[[2.0, 4.0, 0.0]]])
    torch.testing.assert_close(slots.predict(x, 0, 1), 1 + 0.5 * x)
    two = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    slots = make_slots(two, torch.tensor([0.2, 0.8, 0.0]))  # slope 0.5, damped towards it
    change = torch.tensor([0.5 - 0.3 / (1 + DAMPING), 0.5 + 0.3 / (1 + DAMPING), 0.5])
    torch.testing.assert_close(slots.predict(x, 1, 2), 1 + change * x)


def test_steps_after_the_own_one_and_beyond_the_memory_are_not_used() -> None:
    moved = torch.eye(4)
    changed = moved.clone()
    changed[[0, 3]] = 7.0
    x = torch.ones(1, 1, 4)
    found = [make_slots(one, torch.full((4,), 0.5)).predict(x, 2, 2) for one in (moved, changed)]
    assert torch.equal(*found)


def test_without_secants_predictions_stay() -> None:
    slots = make_slots(torch.zeros(3, 2), torch.zeros(3, 2))
    assert torch.equal(slots.predict(torch.full((1, 1, 2), 5.0), 2, 3), torch.ones(1, 1, 2))


def test_steps_are_aligned_by_their_index() -> None:
    index, inside = align([4, 9], [2, 10], 4, [2, 3], torch.device("cpu"))
    assert inside.tolist() == [[False, False, True, True], [True, True, False, False]]
    assert index[inside].tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("network", [STEEP, Varying(KERNEL)], ids=["fixed", "predicted"])
@pytest.mark.parametrize("drafter", [Secant(SIX), Secant(SIX, root=Refresh(), memory=1)])
@pytest.mark.exhaustive
def test_increments_are_those_of_the_sampler(drafter: Secant, network: Any) -> None:
    done = run(drafter, network, batch=800)
    assert surprise(done) < 4.5
    assert max(len(tokens) for one in done.rounds for tokens in one.tokens) > 2


@pytest.mark.exhaustive
def test_increments_of_a_two_step_solver_are_its_own() -> None:
    share = 0.4 * (torch.arange(12).double() > 0)
    network = Steep(replace(KERNEL, extrapolation=share))
    assert surprise(run(Secant(SIX), network, batch=800)) < 4.5


class Early(Secant):
    """Uses predictions and secants one step later, which depend on the noise of the step itself."""

    def observe(self, *news: Any) -> SecantState:
        carried = super().observe(*news)
        parts = vars(carried.slots)
        late = {
            name: torch.cat((parts[name][:, 1:], parts[name][:, -1:]), 1)
            for name in ("state", "clean", "moved", "change", "known")
        }
        return replace(carried, slots=Slots(carried.slots.first, **late))


@pytest.mark.exhaustive
def test_predictions_used_too_early_bias_the_chain() -> None:
    assert surprise(run(Early(SIX), STEEP, batch=1600)) > 6


@dataclass(frozen=True)
class Linear:
    """c = 0.6 x + 0.3: every state of a chain is normal, with mean and variance in closed form."""

    kernel: GaussianKernel
    width: int = 1

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        return Prediction(0.6 * states + 0.3)

    def list_moments(self) -> list[tuple[float, float]]:
        """Mean and variance of every state after the start."""
        mean, variance, found = 0.0, 1.0, []
        for a, b, s in zip(
            *(table.tolist() for table in (self.kernel.state, self.kernel.clean, self.kernel.std)),
            strict=True,
        ):
            mean, variance = (a + 0.6 * b) * mean + 0.3 * b, (a + 0.6 * b) ** 2 * variance + s**2
            found.append((mean, variance))
        return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(("drafter", "is_exact"), [(Secant(SIX), True), (Early(SIX), False)])
def test_states_of_a_line_are_normal_in_closed_form(drafter: Secant, is_exact: bool) -> None:
    """Mean and second moment of 11 states of 4000 chains: false alarm 1e-4 each, 2e-3 in all.

    A mean that is off by 0.09 of a standard deviation is found with probability 0.97.
    """
    network = Linear(KERNEL)
    states = run(drafter, network, shape=(1,), batch=4000).states[:, 1:-1, 0].double()
    worst = 0.0
    for at, (mean, variance) in zip(states.T, network.list_moments(), strict=False):
        z = (at - mean) / variance**0.5
        scores = z.sum() / len(z) ** 0.5, (z**2 - 1).sum() / (2 * len(z)) ** 0.5
        worst = max(worst, *(abs(float(score)) for score in scores))
    assert (worst < 3.9) is is_exact


@pytest.mark.exhaustive
def test_samples_have_the_distribution_of_plain_sampling() -> None:
    """Kolmogorov-Smirnov against other noise, each coordinate; false alarm 1e-4."""
    network = denoiser(12)
    fast = run(Secant(SIX), network, batch=1500, seed=1).states[:, -1]
    slow = plain(network, batch=1500, seed=2).states[:, -1]
    assert distance(fast[:, 0], slow[:, 0]) < 2.3
    assert distance(fast[:, 1], slow[:, 1]) < 2.3


@pytest.mark.exhaustive
def test_secants_save_calls_where_predictions_follow_the_state() -> None:
    calls = {}
    for kind in (Picard, Secant):
        runs = [run(kind(SIX), STEEP, shape=(24,), seed=seed) for seed in range(6)]
        calls[kind] = sum(done.calls for done in runs)
    assert calls[Secant] < calls[Picard]


@pytest.mark.exhaustive
@pytest.mark.parametrize("window", [SIX, Window(pace=Mismatch())], ids=str)
def test_a_row_does_not_notice_its_batch(window: Window) -> None:
    network, ids = denoiser(20), [7, 3, 11]
    together = run(Secant(window), network, batch=3, row_ids=ids, max_rows=1)
    for row, one in enumerate(ids):
        alone = run(Secant(window), network, row_ids=[one], max_rows=1)
        torch.testing.assert_close(together.states[row], alone.states[0], rtol=0, atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a carried window is a chain; give window="):
        Secant(Window.tree((2, 2)))
    for memory in (0, -1, 1.5, True, float("nan")):
        with pytest.raises(ValueError, match=r"memory=.* must be a whole number of at least 1"):
            Secant(memory=memory)  # type: ignore[arg-type]
