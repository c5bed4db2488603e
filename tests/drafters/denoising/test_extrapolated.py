"""Extrapolated drafts: the weights are those of the polynomial, and only committed states count."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mmspec.distributions.kernels import GaussianKernel
from mmspec.drafters.denoising.extrapolated import Extrapolated, newton_weights
from mmspec.drafters.denoising.freeze import Velocity
from mmspec.drafters.denoising.frozen import Frozen, Prefetch, Refresh, Root
from mmspec.drafters.denoising.window import Window
from mmspec.targets.continuous.denoising import Prediction
from mmspec.verifiers.sequence import Sequence
from tests.chains import mixture, vp_grid
from tests.drafters.denoising.toy_chains import Steep, denoiser, run, surprise

STEEP = Steep(GaussianKernel.ancestral(*vp_grid(12)))


def value(seen: list[float], at: float, degree: int) -> float:
    """The forecast of x^degree."""
    weights = newton_weights(seen, at)
    return sum(w * place**degree for w, place in zip(weights, seen, strict=True))


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_forecast_is_exact_for_polynomials_of_its_order(order: int) -> None:
    seen = [1.0, 2.5, 3.0, 5.0][-order - 1 :]
    for degree in range(order + 1):
        assert value(seen, 7.0, degree) == pytest.approx(7.0**degree)
    assert value(seen, 7.0, order + 1) != pytest.approx(7.0 ** (order + 1))


@dataclass(frozen=True)
class Moving:
    """A denoiser whose clean sample is a polynomial of the step, independent of the state."""

    kernel: GaussianKernel
    degree: int
    width: int = 1

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        place = (step.float() / 10) ** self.degree
        return Prediction(place[:, None].expand_as(states))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("root", [Prefetch(), Refresh()], ids=repr)
def test_drafts_of_what_moves_regularly_are_accepted(degree: int, root: Root) -> None:
    """Only the rounds before the history is long enough can fail."""
    network = Moving(GaussianKernel.ancestral(*vp_grid(30)), degree)
    right = run(Extrapolated(Window.constant(6), order=degree, root=root), network)
    frozen = run(Frozen(Window.constant(6), root=root), network)
    tail = [kept for kept in right.rounds if kept.drafted[0]][degree + 2 :]
    assert tail
    assert all(kept.accepted == kept.drafted for kept in tail)
    assert right.calls < frozen.calls


@pytest.mark.parametrize("root", [Prefetch(), Refresh()], ids=repr)
def test_order_0_is_the_frozen_draft_bit_for_bit(root: Root) -> None:
    network = denoiser(20)
    for window in (Window(), Window.tree((2, 2))):
        left = run(Frozen(window, root=root), network, Sequence(), batch=4, seed=3)
        drafter = Extrapolated(window, order=0, root=root)
        right = run(drafter, network, Sequence(), batch=4, seed=3)
        assert torch.equal(left.states, right.states)
        assert left.calls == right.calls


@pytest.mark.parametrize("root", [Prefetch(), Refresh()], ids=repr)
@pytest.mark.parametrize("order", [1, 2])
def test_increments_are_those_of_the_sampler(order: int, root: Root) -> None:
    drafter = Extrapolated(Window.constant(5), Velocity(), root, order)
    assert surprise(run(drafter, STEEP, batch=300)) < 4.5


def test_a_row_does_not_notice_its_batch() -> None:
    network, ids = denoiser(20), [7, 3, 11]
    together = run(Extrapolated(), network, batch=3, row_ids=ids, max_rows=1)
    for row, one in enumerate(ids):
        alone = run(Extrapolated(), network, row_ids=[one], max_rows=1)
        assert torch.equal(together.states[row], alone.states[0])


def test_it_helps_where_a_sampler_draws_little_noise() -> None:
    kernel = GaussianKernel.ddim(*vp_grid(50, "linear"), eta=0.05)
    network = mixture(64, 4, 0).denoiser(kernel)
    window, calls = Window.constant(10), []
    for drafter in (Frozen(window, root=Prefetch()), Extrapolated(window, root=Prefetch())):
        calls.append(sum(run(drafter, network, shape=(64,), seed=s).calls for s in range(2)))
    assert calls[1] < calls[0]


@pytest.mark.parametrize("order", [-1, 1.5, 10**9])
def test_orders_out_of_range_are_refused(order: float) -> None:
    with pytest.raises(ValueError, match=f"order={order} must be a whole number of at least 0"):
        Extrapolated(order=order)  # type: ignore[arg-type]
