"""Samplers of schedulers against the schedulers' own `step` with the same noise."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMParallelScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor

from mmspec.modalities.diffusion.schedulers import Sampler, read_scheduler
from mmspec.targets.continuous.denoising import Prediction
from tests.covering import covering

SPACINGS = ("leading", "linspace", "trailing")
SHAPE = (2, 3, 4, 4)
KINDS = ("epsilon", "sample", "v_prediction")
LIMITS = ("none", "clip", "threshold")
SDE = {"algorithm_type": "sde-dpmsolver++", "solver_order": 1}
ODE = {**SDE, "algorithm_type": "dpmsolver++"}


def _network(states: Tensor, t: Tensor, channels: int = 3) -> Tensor:
    """A smooth function of state and timestep per row, usable as any prediction type."""
    out = 1.5 * torch.sin(2 * states.flip(2) + states + t.double().reshape(-1, 1, 1, 1) / 300)
    return torch.cat((out, 0.5 * torch.cos(states) - 0.1), 1)[:, :channels]


def _noise(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _widen(scheduler: Any) -> Any:
    """Make the scheduler compute in float64, so that only formulas are compared."""
    for name in ("alphas_cumprod", "sigmas", "final_alpha_cumprod"):
        if getattr(scheduler, name, None) is not None:
            setattr(scheduler, name, getattr(scheduler, name).double())
    return scheduler


def _gap(scheduler: Any, found: Sampler, channels: int = 3, **step: Any) -> float:
    """The largest difference of a step along a chain of the scheduler, relative to the state."""
    drawn = torch.float64
    if isinstance(scheduler, DPMSolverMultistepScheduler | FlowMatchEulerDiscreteScheduler):
        drawn = torch.float32
    x = _noise(1000, torch.float64) * float(found.kernel.sigma[0])
    worst, before = 0.0, x
    for n, t in enumerate(scheduler.timesteps):
        index, size = torch.full((2,), n), float(x.abs().max().clamp_min(1))
        assert found.timesteps[n] == t
        shown = scheduler.scale_model_input(x, t) if found.scale is not None else x
        torch.testing.assert_close(found.scale_states(x, index), shown, atol=1e-6, rtol=1e-6)
        raw = _network(shown, t.expand(2), channels)
        seen = found.clean(raw, x, index)
        std = found.kernel.std_at(index, x) if seen.std is None else seen.std
        clean, before = found.kernel.extrapolate(seen.clean, before, index), seen.clean
        ours = found.kernel.mean(x, clean, index) + std * _noise(n, drawn).double()
        seeded = torch.Generator().manual_seed(n)
        x = scheduler.step(raw, t, x, generator=seeded, **step).prev_sample.double()
        worst = max(worst, float((ours - x).abs().max()) / size)
    return worst


@pytest.mark.parametrize(
    ("spacing", "kind", "limit", "offset"), covering(SPACINGS, KINDS, LIMITS, (0, 1))
)
def test_ddpm(spacing: str, kind: str, limit: str, offset: int) -> None:
    scheduler = DDPMScheduler(
        timestep_spacing=spacing,
        prediction_type=kind,
        clip_sample=limit == "clip",
        thresholding=limit == "threshold",
        sample_max_value=1.5,
        steps_offset=offset,
    )
    scheduler.set_timesteps(10)
    found = read_scheduler(_widen(scheduler))
    assert found.kernel.num_steps == 10
    assert _gap(scheduler, found) < 1e-9


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("variance", ["fixed_small_log", "fixed_large", "learned_range", "learned"])
def test_variances_of_ddpm(spacing: str, variance: str) -> None:
    scheduler = DDPMScheduler(timestep_spacing=spacing, variance_type=variance)
    scheduler.set_timesteps(12)
    found, channels = read_scheduler(_widen(scheduler)), 6 if variance.startswith("learned") else 3
    if variance == "learned":  # the output is the variance itself: only its size can be compared
        raw = torch.cat((torch.zeros(SHAPE), torch.full(SHAPE, 0.25)), 1).double()
        seen = found.clean(raw, _noise(0, torch.float64), torch.tensor([3, 11]))
        last = 0.0 if spacing != "trailing" else 0.5
        assert seen.std is not None
        assert seen.std[:, 0, 0, 0].tolist() == [0.5, last]
        return
    assert _gap(scheduler, found, channels) < 1e-9


def test_a_learned_variance_follows_step() -> None:
    scheduler = DDPMScheduler(variance_type="learned")
    scheduler.set_timesteps(10)
    found = read_scheduler(_widen(scheduler))
    x, t = _noise(0, torch.float64), scheduler.timesteps[4]
    raw = torch.cat((_noise(1, torch.float64), _noise(2, torch.float64).abs()), 1)
    want = scheduler.step(raw, t, x, generator=torch.Generator().manual_seed(3)).prev_sample
    index = torch.full((2,), 4)
    seen = found.clean(raw, x, index)
    assert seen.std is not None
    got = found.kernel.mean(x, seen.clean, index) + seen.std * _noise(3, torch.float64)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_fixed_large_log_is_what_it_was_meant_to_be() -> None:
    """diffusers takes the square root of the logarithm; the kernel here is that of fixed_large."""
    scheduler = DDPMScheduler(variance_type="fixed_large_log")
    scheduler.set_timesteps(10)
    x = _noise(0, torch.float32)
    assert scheduler.step(x, scheduler.timesteps[3], x).prev_sample.isnan().all()
    large = DDPMScheduler(variance_type="fixed_large")
    large.set_timesteps(10)
    assert torch.equal(read_scheduler(scheduler).kernel.std, read_scheduler(large).kernel.std)


def test_every_step_of_training_and_custom_timesteps() -> None:
    whole = _widen(DDPMScheduler(num_train_timesteps=100))
    assert (
        _gap(whole, read_scheduler(whole)) < 1e-9
    )  # set_timesteps never called: the training grid
    whole.set_timesteps(timesteps=[99, 70, 33, 32, 7])
    assert _gap(whole, read_scheduler(whole)) < 1e-9


@pytest.mark.parametrize(
    ("spacing", "kind", "limit", "eta"), covering(SPACINGS, KINDS, LIMITS, (1.0, 0.4, 0.0))
)
def test_ddim(spacing: str, kind: str, limit: str, eta: float) -> None:
    scheduler = DDIMScheduler(
        timestep_spacing=spacing,
        prediction_type=kind,
        clip_sample=limit == "clip",
        thresholding=limit == "threshold",
        sample_max_value=1.5,
        set_alpha_to_one=spacing == "leading",
        steps_offset=int(spacing == "leading"),
    )
    scheduler.set_timesteps(10)
    if spacing == "linspace" and limit != "none":
        with pytest.raises(ValueError, match="set_alpha_to_one=True"):
            read_scheduler(scheduler, eta=eta, deterministic=True)
        return
    found = read_scheduler(_widen(scheduler), eta=eta, deterministic=True)
    assert any(found.kernel.is_random) is (eta > 0)
    assert _gap(scheduler, found, eta=eta) < 1e-9


@pytest.mark.parametrize("family", [DDPMScheduler, DDIMScheduler])
@pytest.mark.parametrize("spacing", ["linspace", "trailing"])
def test_zero_terminal_snr(family: Any, spacing: str) -> None:
    """The first state is pure noise (alpha = 0), which needs v-prediction."""
    settings = {"rescale_betas_zero_snr": True, "timestep_spacing": spacing, "clip_sample": False}
    scheduler = family(**settings, prediction_type="v_prediction")
    scheduler.set_timesteps(20)
    extra: dict[str, Any] = {"eta": 1.0} if family is DDIMScheduler else {}
    found = read_scheduler(_widen(scheduler), **extra)
    assert found.kernel.alpha[0] == 0
    # diffusers' DDIM takes the root of 1 - alpha - std^2 there: 0, or the rounding of float64
    assert _gap(scheduler, found, **extra) < (1e-7 if extra else 1e-9)
    scheduler = family(**settings)
    scheduler.set_timesteps(20)
    with pytest.raises(ValueError, match="zero terminal SNR"):
        read_scheduler(scheduler, **extra)


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("rescaled", [False, True])
def test_euler_ancestral(spacing: str, kind: str, rescaled: bool) -> None:
    scheduler = EulerAncestralDiscreteScheduler(
        timestep_spacing=spacing, prediction_type=kind, rescale_betas_zero_snr=rescaled
    )
    scheduler.set_timesteps(8)
    found = read_scheduler(_widen(scheduler))
    assert _gap(scheduler, found) < 1e-6  # its states are float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"timestep_spacing": "trailing"},
        {"use_karras_sigmas": True},
        {"final_sigmas_type": "sigma_min"},
        {"timestep_type": "continuous"},
        {"interpolation_type": "log_linear"},
    ],
    ids=lambda extra: next(iter(extra), "plain"),
)
def test_euler(kind: str, extra: dict[str, Any]) -> None:
    scheduler = EulerDiscreteScheduler(prediction_type=kind, **extra)
    scheduler.set_timesteps(8)
    found = read_scheduler(_widen(scheduler), deterministic=True)
    assert not any(found.kernel.is_random)
    assert _gap(scheduler, found) < 1e-6  # its states are float32


FIRST_ORDER: list[dict[str, Any]] = [
    {},
    {"thresholding": True, "sample_max_value": 1.5},
    {"use_karras_sigmas": True},
    {"final_sigmas_type": "sigma_min"},
    {"use_flow_sigmas": True, "flow_shift": 3.0},
    {"rescale_betas_zero_snr": True},
]


@pytest.mark.parametrize(
    ("solver", "spacing", "kind", "extra"),
    covering((SDE, ODE), SPACINGS, (*KINDS, "flow_prediction"), FIRST_ORDER),
)
def test_dpm(solver: dict[str, Any], spacing: str, kind: str, extra: dict[str, Any]) -> None:
    scheduler = DPMSolverMultistepScheduler(
        timestep_spacing=spacing, prediction_type=kind, **solver, **extra
    )
    scheduler.set_timesteps(8)
    found = read_scheduler(_widen(scheduler), deterministic=True)
    assert any(found.kernel.is_random) is (solver is SDE)
    assert _gap(scheduler, found) < 2e-6  # its states are float32


SECOND_ORDER: list[dict[str, Any]] = [
    {},
    {"use_karras_sigmas": True},
    {"final_sigmas_type": "sigma_min"},
    {"lower_order_final": False, "euler_at_final": True},
    {"use_flow_sigmas": True, "prediction_type": "flow_prediction"},
]


@pytest.mark.parametrize(
    ("kind", "solver", "steps", "extra"),
    covering(("dpmsolver++", "sde-dpmsolver++"), ("midpoint", "heun"), (5, 20), SECOND_ORDER),
)
def test_dpm_of_order_2(kind: str, solver: str, steps: int, extra: dict[str, Any]) -> None:
    scheduler = DPMSolverMultistepScheduler(algorithm_type=kind, solver_type=solver, **extra)
    scheduler.set_timesteps(steps)
    found = read_scheduler(_widen(scheduler), deterministic=True)
    assert found.kernel.extrapolation is not None
    assert bool((found.kernel.extrapolation[1:-1] > 0).all())
    assert _gap(scheduler, found) < 1e-6


def test_dpm_ignores_a_predicted_variance() -> None:
    scheduler = DPMSolverMultistepScheduler(variance_type="learned_range", **SDE)
    scheduler.set_timesteps(5)
    found, x = read_scheduler(scheduler), _noise(0, torch.float32)
    raw = _network(x, torch.ones(2), 6)
    step = torch.zeros(2, dtype=torch.int64)
    assert torch.equal(
        found.clean(raw, x, step).clean,
        found.clean(torch.cat((raw[:, :3], 0 * raw[:, 3:]), 1), x, step).clean,
    )


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_stochastic_flow(shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift, stochastic_sampling=True)
    scheduler.set_timesteps(8)
    assert _gap(scheduler, read_scheduler(_widen(scheduler))) < 1e-6  # its states are float32


@pytest.mark.parametrize("asked", [{}, {"churn": 1e-9}, {"eta": 1e-9}], ids=str)
def test_a_flow_with_no_noise_or_hardly_any_is_the_euler_flow(asked: dict[str, float]) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(8)
    found = read_scheduler(_widen(scheduler), deterministic=True, **asked)
    assert any(found.kernel.is_random) is bool(asked)
    assert _gap(scheduler, found) < 1e-6  # its states are float32


def test_rows_at_their_own_steps() -> None:
    """Rows of one call may be at any step: each is converted independently."""
    scheduler = DDIMScheduler(thresholding=True, timestep_spacing="trailing")
    scheduler.set_timesteps(12)
    found, x = read_scheduler(scheduler, eta=0.7), torch.randn(6, 3, 4, 4)
    step = torch.tensor([0, 11, 4, 4, 7, 2])
    raw = _network(x, found.timesteps[step]).float()
    together = found.clean(raw, x, step)
    for row in range(6):
        alone = found.clean(raw[row, None], x[row, None], step[row, None])
        assert torch.equal(together.clean[row], alone.clean[0])
    euler = EulerAncestralDiscreteScheduler()
    euler.set_timesteps(12)
    found = read_scheduler(euler)
    for row in range(6):
        euler._step_index = int(step[row])
        want = euler.scale_model_input(x[row], found.timesteps[step[row]])
        torch.testing.assert_close(found.scale_states(x, step)[row], want)


def test_the_parallel_helper_of_diffusers_is_another_sampler() -> None:
    """`batch_step_no_noise` strides by T // N, which is not the grid of "linspace"."""
    for spacing, right in (("leading", True), ("linspace", False)):
        scheduler = DDPMParallelScheduler(timestep_spacing=spacing)
        scheduler.set_timesteps(30)
        found, x = read_scheduler(_widen(scheduler)), _noise(0, torch.float64)
        t = scheduler.timesteps[[10, 20]]
        raw = _network(x, t)
        parallel = scheduler.batch_step_no_noise(raw, t, x)
        step = torch.tensor([10, 20])
        mean = found.kernel.mean(x, found.clean(raw, x, step).clean, step)
        assert torch.allclose(parallel, mean, atol=1e-6) is right


@pytest.mark.parametrize(
    ("family", "settings", "way"),
    [
        ("DDIMScheduler", {}, "eta=1.0"),
        ("EulerDiscreteScheduler", {}, "EulerAncestralDiscreteScheduler"),
        ("HeunDiscreteScheduler", {}, "EulerAncestralDiscreteScheduler"),
        ("DPMSolverMultistepScheduler", {}, 'algorithm_type="sde-dpmsolver'),
        ("DPMSolverMultistepScheduler", {"solver_order": 1}, 'algorithm_type="sde-dpmsolver'),
        ("DPMSolverMultistepScheduler", {**SDE, "solver_order": 3}, "solver_order=2"),
        ("UniPCMultistepScheduler", {}, 'algorithm_type="sde-dpmsolver'),
        ("PNDMScheduler", {}, "DDIMScheduler"),
        ("FlowMatchEulerDiscreteScheduler", {}, "churn=1.0"),
    ],
)
def test_a_deterministic_sampler_is_refused_with_a_way_out(
    family: str, settings: dict[str, Any], way: str
) -> None:
    scheduler = getattr(diffusers, family)(**settings)
    scheduler.set_timesteps(5)
    with pytest.raises(ValueError, match="an exact recipe needs") as error:
        read_scheduler(scheduler)
    assert way in str(error.value)
    assert "speca or taylorseer" in str(error.value)


def test_unsupported_schedulers_are_refused() -> None:
    unknown = diffusers.LCMScheduler()
    with pytest.raises(ValueError, match="LCMScheduler; supported schedulers: DDPM"):
        read_scheduler(unknown)

    class Altered(DDPMScheduler):  # type: ignore[misc]
        def step(self, *inputs: Any, **extra: Any) -> Any:
            return super().step(*inputs, **extra)

    with pytest.raises(ValueError, match="does not support Altered"):
        read_scheduler(Altered())
    flow = FlowMatchEulerDiscreteScheduler()
    with pytest.raises(ValueError, match="call set_timesteps"):
        read_scheduler(flow, eta=1.0)
    flow.set_timesteps(5)
    with pytest.raises(ValueError, match="eta and churn each set"):
        read_scheduler(flow, eta=1.0, churn=1.0)
    with pytest.raises(ValueError, match="0 < eta <= 1"):
        read_scheduler(flow, eta=1.5)
    with pytest.raises(ValueError, match=r"churn=-1\.0 must be positive"):
        read_scheduler(flow, churn=-1.0)
    with pytest.raises(ValueError, match=r"eta=1\.0 is not supported by DDPM"):
        read_scheduler(DDPMScheduler(), eta=1.0)
    with pytest.raises(ValueError, match="call set_timesteps"):
        read_scheduler(DDIMScheduler(), eta=1.0)
    with pytest.raises(ValueError, match="invert_sigmas"):
        read_scheduler(FlowMatchEulerDiscreteScheduler(invert_sigmas=True), eta=1.0)


def test_outputs_of_another_shape_are_refused() -> None:
    x, step = torch.zeros(SHAPE), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="second half cut off"):
        read_scheduler(DDPMScheduler()).clean(torch.zeros(2, 6, 4, 4), x, step)
    learned = read_scheduler(DDPMScheduler(variance_type="learned_range"))
    with pytest.raises(ValueError, match="6 output channels, but the network has 3"):
        learned.clean(x, x, step)


def test_single_precision_is_enough() -> None:
    """In float32 chains agree up to rounding."""
    scheduler = DDPMScheduler(clip_sample=False, prediction_type="v_prediction")
    scheduler.set_timesteps(50)
    found = read_scheduler(scheduler)
    x = _noise(0, torch.float32)
    step = torch.tensor([7, 40])
    raw = _network(x, found.timesteps[step]).float()
    seen = found.clean(raw.bfloat16(), x, step)
    assert isinstance(seen, Prediction)
    assert seen.clean.dtype == torch.float32
    mean = found.kernel.mean(x, found.clean(raw, x, step).clean, step)
    for row, n in enumerate(step.tolist()):
        t = scheduler.timesteps[n]
        alike = torch.Generator().manual_seed(9)
        want = scheduler.step(raw[row, None], t, x[row, None], generator=alike).prev_sample
        noise = torch.randn(1, *SHAPE[1:], generator=torch.Generator().manual_seed(9))
        got = mean[row, None] + found.kernel.std_at(step, x)[row, None] * noise
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
