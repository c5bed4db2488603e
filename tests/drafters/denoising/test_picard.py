"""The carried window: sequential sampling under equality, exact and fast under reflection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.distributions.kernels import GaussianKernel
from mmspec.drafters.denoising.freeze import Clean, Freeze, Increment
from mmspec.drafters.denoising.frozen import Frozen, Prefetch, Refresh, Root
from mmspec.drafters.denoising.picard import Picard, PicardState
from mmspec.drafters.denoising.window import Constant, Mismatch, Window
from mmspec.recipe import pair
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.gaussian_block import GaussianBlock
from mmspec.verifiers.tolerance_window import ToleranceWindow
from tests.chains import mixture, vp_grid
from tests.covering import covering
from tests.drafters.denoising.toy_chains import Steep, denoiser, distance, plain, run, surprise

FREEZES = [Clean(), Increment()]
STEEP = Steep(GaussianKernel.ancestral(*vp_grid(12)))


@pytest.mark.parametrize(
    ("verifier", "freeze"),
    covering([Coupled(), ToleranceWindow(0.0)], FREEZES, strength=1),
    ids=repr,
)
def test_without_tolerance_it_is_the_sequential_chain(freeze: Freeze, verifier: Any) -> None:
    network = denoiser(20)
    for window in (2, 7, 20):
        drafter = Picard(Window.constant(window), freeze)
        done = run(drafter, network, verifier, batch=3, max_rows=1)
        assert torch.equal(done.states, plain(network, batch=3, max_rows=1).states)
        assert done.calls <= 20  # at least one state is done by every sweep


def test_samplers_without_noise_are_drafted_where_the_window_says_so() -> None:
    kernel = GaussianKernel.ddim(*vp_grid(40), eta=0.0)
    network = mixture(2, 4, 0).denoiser(kernel)
    slow = plain(network, batch=4, max_rows=1)
    still = Picard(Window(12, Constant(), deterministic=True))
    none = run(still, network, ToleranceWindow(0.0), batch=4, max_rows=1)
    assert torch.equal(none.states, slow.states)
    some = run(still, network, ToleranceWindow(0.1), batch=4)
    assert some.calls < none.calls < 40
    assert float((some.states - slow.states)[:, -1].norm(dim=-1).max()) < 0.2
    assert run(Picard(Window.constant(12)), network, ToleranceWindow(0.1), batch=4).calls == 40


@pytest.mark.parametrize("freeze", FREEZES, ids=repr)
def test_tolerance_buys_calls(freeze: Freeze) -> None:
    network = denoiser(60, d=16)
    calls = [
        run(Picard(Window.constant(12), freeze), network, ToleranceWindow(t), shape=(16,)).calls
        for t in (0.0, 0.1, 0.5)
    ]
    assert calls[0] > calls[1] > calls[2]


@pytest.mark.parametrize("root", [Prefetch(), Refresh()], ids=repr)
@pytest.mark.parametrize("freeze", FREEZES, ids=repr)
def test_under_reflection_increments_are_those_of_the_sampler(freeze: Freeze, root: Root) -> None:
    done = run(Picard(Window.constant(6), freeze, root), STEEP, batch=800)
    assert done.calls < 13
    assert surprise(done) < 4.5


def test_samples_have_the_distribution_of_plain_sampling() -> None:
    """Kolmogorov-Smirnov against other noise, each coordinate; false alarm 1e-4."""
    network = denoiser(12)
    fast = run(Picard(Window.constant(6)), network, batch=1500, seed=1).states[:, -1]
    slow = plain(network, batch=1500, seed=2).states[:, -1]
    assert distance(fast[:, 0], slow[:, 0]) < 2.3
    assert distance(fast[:, 1], slow[:, 1]) < 2.3


class Early(Picard):
    """Uses the prediction one step later, which depends on the noise of the step itself."""

    def observe(self, *news: Any) -> PicardState:
        carried = super().observe(*news)
        carried.step = [step - 1 for step in carried.step]
        return carried


def test_a_prediction_used_too_early_biases_the_chain() -> None:
    assert surprise(run(Early(Window.constant(6)), STEEP, batch=800)) > 6


def test_what_was_seen_behind_rejections_saves_calls() -> None:
    network = denoiser(100, d=64, components=8)
    calls = {}
    for drafter in (Frozen(Window.constant(20), root=Prefetch()), Picard(Window.constant(20))):
        runs = [run(drafter, network, shape=(64,), seed=seed) for seed in range(3)]
        calls[type(drafter)] = sum(done.calls for done in runs)
    assert calls[Picard] < 0.8 * calls[Frozen]


@pytest.mark.parametrize("window", [Window(), Window(pace=Mismatch())], ids=str)
def test_a_row_does_not_notice_its_batch(window: Window) -> None:
    network, ids = denoiser(20), [7, 3, 11]
    together = run(Picard(window), network, batch=3, row_ids=ids, max_rows=1)
    for row, one in enumerate(ids):
        alone = run(Picard(window), network, row_ids=[one], max_rows=1)
        assert torch.equal(together.states[row], alone.states[0])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a carried window is a chain; give window="):
        Picard(Window.tree((2, 2)))
    target = plain(denoiser(4)).target
    with pytest.raises(ValueError, match="GaussianBlock"):
        pair(Picard(), GaussianBlock(), target)
