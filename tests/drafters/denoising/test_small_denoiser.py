"""Independent denoisers as drafts, from perfect to adversarial: always exact."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mmspec.distributions.kernels import GaussianKernel
from mmspec.drafters.denoising.small_denoiser import IndependentDenoiser, check_grids
from mmspec.drafters.denoising.window import Window
from mmspec.targets.continuous.denoising import Denoiser, Prediction
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.sequence import Sequence
from tests.chains import vp_grid
from tests.drafters.denoising.toy_chains import Steep, denoiser, plain, run, surprise

STEEP = Steep(GaussianKernel.ancestral(*vp_grid(12)))


@dataclass(frozen=True)
class Off:
    """A denoiser that is wrong by a shift and a factor; counts the states it is called on."""

    inner: Denoiser
    shift: float
    called_rows: list[int]
    width: int = 1

    @property
    def kernel(self) -> GaussianKernel:
        return self.inner.kernel

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        self.called_rows.append(len(states))
        return Prediction(self.inner.predict(states, step, row).clean + self.shift)


def test_a_copy_of_the_target_gives_its_chain_in_a_call_a_window() -> None:
    network = denoiser(20)
    for window in (1, 3, 5, 20):
        done = run(
            IndependentDenoiser(Window.constant(window), denoiser=network), network, max_rows=1
        )
        assert torch.equal(done.states, plain(network, max_rows=1).states)
        assert done.calls == -(-20 // window)


def test_a_copy_agrees_with_every_verifier_that_compares() -> None:
    network = denoiser(20)
    done = run(
        IndependentDenoiser(Window.constant(5), denoiser=network), network, Coupled(), max_rows=1
    )
    assert torch.equal(done.states, plain(network, max_rows=1).states)
    assert done.calls == 4


@pytest.mark.parametrize("shift", [0.3, 1e3])
def test_wrong_drafts_are_exact(shift: float) -> None:
    called_rows: list[int] = []
    done = run(
        IndependentDenoiser(Window.constant(4), denoiser=Off(STEEP, shift, called_rows)),
        STEEP,
        batch=800,
    )
    assert surprise(done) < 4.5
    accepted = sum(sum(kept.accepted) for kept in done.rounds)
    assert (accepted == 0) == (shift > 1)
    if not accepted:
        assert done.calls == 12


def test_only_states_that_are_drafted_are_asked_for() -> None:
    called_rows: list[int] = []
    network = denoiser(20)
    drafter = IndependentDenoiser(Window.constant(5), denoiser=Off(network, 0.2, called_rows))
    done = run(drafter, network, batch=4)
    assert sum(called_rows) == sum(sum(kept.drafted) for kept in done.rounds)


def test_a_tree_asks_once_per_parent() -> None:
    called_rows: list[int] = []
    drafter = IndependentDenoiser(Window.tree((3, 2)), denoiser=Off(STEEP, 0.2, called_rows))
    done = run(drafter, STEEP, Sequence(), batch=500)
    assert surprise(done) < 4.5


def test_grids_have_to_agree() -> None:
    kernel = GaussianKernel.ancestral(*vp_grid(12))
    check_grids(kernel, kernel)
    with pytest.raises(ValueError, match="takes 6 steps and the target's 12"):
        check_grids(GaussianKernel.ancestral(*vp_grid(6)), kernel)
    with pytest.raises(ValueError, match="differ in alpha"):
        check_grids(GaussianKernel.ancestral(*vp_grid(12, "linear")), kernel)
