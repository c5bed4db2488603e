"""Outputs of denoising networks: all kinds predict the same clean sample, within limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.kernels import GaussianKernel
from mmspec.modalities.diffusion.mixture import vp_grid
from mmspec.modalities.diffusion.parameterisation import (
    KINDS,
    Clip,
    DynamicThreshold,
    PredictedStd,
    PredictionConverter,
)

ALPHA, SIGMA = (level[:-1] for level in vp_grid(6))
KERNEL = GaussianKernel.ancestral(*vp_grid(6))
STEP = torch.arange(6)


def noised(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Clean samples, noise, and states of every step, (6, 2, 3, 3) each."""
    generator = torch.Generator().manual_seed(seed)
    clean, eps = torch.randn(2, 6, 2, 3, 3, generator=generator, dtype=torch.float64)
    return clean, eps, ALPHA.view(-1, 1, 1, 1) * clean + SIGMA.view(-1, 1, 1, 1) * eps


@pytest.mark.parametrize("kind", KINDS)
def test_the_true_output_gives_the_clean_sample(kind: str) -> None:
    clean, eps, states = noised()
    alpha, sigma = ALPHA.view(-1, 1, 1, 1), SIGMA.view(-1, 1, 1, 1)
    if kind == "flow_prediction":  # states are (1 - t) x0 + t eps, with sigma = t
        states = (1 - sigma) * clean + sigma * eps
    output = {
        "epsilon": eps,
        "sample": clean,
        "v_prediction": alpha * eps - sigma * clean,
        "flow_prediction": eps - clean,
    }[kind]
    found = PredictionConverter.of(kind, ALPHA, SIGMA)(output, states, STEP, KERNEL)
    assert_close(found.clean, clean)
    assert found.std is None


def test_states_of_any_scale_give_the_same_velocity_prediction() -> None:
    """A network sees the state scaled to variance 1, so the scale of states cancels."""
    clean, eps, states = noised()
    output = ALPHA.view(-1, 1, 1, 1) * eps - SIGMA.view(-1, 1, 1, 1) * clean
    scaled = PredictionConverter.of("v_prediction", 3 * ALPHA, 3 * SIGMA)
    assert_close(scaled(output, 3 * states, STEP, KERNEL).clean, clean)


def test_limits_that_nothing_exceeds_change_nothing() -> None:
    clean = noised()[0]
    assert torch.equal(Clip(100.0)(clean), clean)
    small = clean / clean.abs().max()
    assert torch.equal(DynamicThreshold(0.9, 5.0)(small), small)
    assert float(Clip(0.5)(clean).abs().max()) == 0.5
    assert float(DynamicThreshold(0.5, 5.0)(4 * clean).abs().max()) == 1


def test_a_limit_that_keeps_the_noise_moves_the_mean_by_its_rest() -> None:
    clean, eps, states = noised()
    rest = torch.linspace(0, 1, 6).double()
    plain = PredictionConverter.of("epsilon", ALPHA, SIGMA)
    kept = PredictionConverter(plain.from_state, plain.from_output, Clip(0.3), rest)
    change = kept(eps, states, STEP, KERNEL).clean - clean
    assert_close(change, rest.view(-1, 1, 1, 1) * (clean.clamp(-0.3, 0.3) - clean))


def test_a_predicted_std_lies_between_its_bounds() -> None:
    low, high = torch.full((6,), 0.01).double(), torch.full((6,), 0.25).double()
    predict = PredictedStd(low, high)
    ends = [predict(torch.full((6, 1), end).double(), STEP) for end in (-1.0, 0.0, 1.0)]
    for found, std in zip(ends, (0.1, (0.01 * 0.25) ** 0.25, 0.5), strict=True):
        assert_close(found, torch.full((6, 1), std).double())
    assert_close(PredictedStd()(torch.full((6, 1), 0.04), STEP), torch.full((6, 1), 0.2))


def test_deterministic_steps_have_no_predicted_std() -> None:
    _, eps, states = noised()
    both = torch.cat((eps, torch.ones_like(eps)), 1)
    plain = PredictionConverter.of("epsilon", ALPHA, SIGMA)
    learned = PredictionConverter(plain.from_state, plain.from_output, std=PredictedStd())
    found = learned(both, states, STEP, KERNEL).std
    assert found is not None
    noisy = KERNEL.std > 0
    assert not noisy.all()
    assert_close(found.amax((1, 2, 3)), noisy.double())


def test_outputs_that_do_not_fit_are_refused() -> None:
    _, eps, states = noised()
    plain = PredictionConverter.of("epsilon", ALPHA, SIGMA)
    learned = PredictionConverter(plain.from_state, plain.from_output, ignores_variance=True)
    assert_close(
        learned(torch.cat((eps, eps), 1), states, STEP, KERNEL).clean,
        plain(eps, states, STEP, KERNEL).clean,
    )
    for call, says in (
        (lambda: plain(torch.cat((eps, eps), 1), states, STEP, KERNEL), "second half cut off"),
        (lambda: learned(eps, states, STEP, KERNEL), "4 output channels, but the network has 2"),
        (lambda: PredictionConverter.of("epsilon", 0 * ALPHA, SIGMA), "zero terminal SNR"),
        (lambda: PredictionConverter.of("noise", ALPHA, SIGMA), "must be one of epsilon"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
