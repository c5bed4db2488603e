"""The counterpart with noise: the same noise levels, the same end, and the pipeline left alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import mmspec
from mmspec.modalities.diffusion.schedulers import read_scheduler
from mmspec.modalities.diffusion.stochastic_sampler import (
    TOLERANCE,
    _compare_levels,
    make_stochastic,
)
from tests.modalities.sampling import draw
from tests.toys.pipelines import pipeline

PLAIN: dict[str, Any] = {"recipe": "paradigms", "window": 1}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
KARRAS = {"use_karras_sigmas": True}
SHIPPED: list[tuple[str, dict[str, Any], str]] = [
    ("EulerDiscrete", {"beta_schedule": "scaled_linear"}, "EulerAncestralDiscrete"),
    ("EulerDiscrete", {"timestep_spacing": "leading", "steps_offset": 1}, "EulerAncestralDiscrete"),
    ("EulerDiscrete", {"prediction_type": "v_prediction"}, "EulerAncestralDiscrete"),
    ("EulerDiscrete", KARRAS, "DPMSolverMultistep"),
    ("HeunDiscrete", {}, "EulerAncestralDiscrete"),  # whose betas are others by default
    ("LMSDiscrete", {}, "EulerAncestralDiscrete"),
    ("KDPM2Discrete", KARRAS, "DPMSolverMultistep"),
    ("DPMSolverMultistep", {"solver_order": 3}, "DPMSolverMultistep"),
    ("DPMSolverMultistep", FLOW, "DPMSolverMultistep"),
    ("UniPCMultistep", FLOW, "DPMSolverMultistep"),
    ("UniPCMultistep", KARRAS, "DPMSolverMultistep"),
    ("DEISMultistep", {}, "DPMSolverMultistep"),
    ("PNDM", {"skip_prk_steps": True, "steps_offset": 1}, "DDIM"),
    ("DDIM", {}, "DDIM"),
    ("DDPM", {}, "DDPM"),
    ("FlowMatchHeunDiscrete", {"shift": 3.0}, "FlowMatchEulerDiscrete"),
    ("FlowMatchEulerDiscrete", {"use_dynamic_shifting": True}, "FlowMatchEulerDiscrete"),
]


def scheduler(name: str, **config: Any) -> Any:
    return getattr(diffusers, f"{name}Scheduler")(**config)


@pytest.mark.parametrize(("name", "config", "expected"), SHIPPED)
def test_the_counterpart_draws_noise_on_the_same_levels(
    name: str, config: dict[str, Any], expected: str
) -> None:
    shipped = scheduler(name, **config)
    made = make_stochastic(shipped)
    assert type(made.scheduler).__name__ == f"{expected}Scheduler"
    assert _compare_levels(shipped, made.scheduler) < TOLERANCE
    theirs, ours = dict(shipped.config), dict(made.scheduler.config)
    for key in {"prediction_type", "flow_shift", "beta_start", "shift"} & theirs.keys():
        assert ours[key] == theirs[key]
    assert not made.scheduler.config.get("clip_sample") or shipped.config.clip_sample
    shifts = {"mu": 1.0} if config.get("use_dynamic_shifting") else {}
    made.scheduler.set_timesteps(8, **shifts)
    assert read_scheduler(made.scheduler, made.eta).is_stochastic
    assert expected in made.change


def end_variance(scheduler: Any, eta: float | None, steps: int) -> float:
    """Of a chain of order 1 that samples normal data of variance 1 / 4 by their exact score."""
    scheduler.set_timesteps(steps)
    kernel = read_scheduler(scheduler, eta, deterministic=True).kernel
    a, b, s = kernel.state, kernel.clean, kernel.std
    alpha, sigma = kernel.alpha[:-1], kernel.sigma[:-1]
    gain = alpha / 4 / (alpha**2 / 4 + sigma**2)  # E[x0 | x] = gain x
    variance = alpha[0] ** 2 / 4 + sigma[0] ** 2
    for step in range(steps):
        variance = (a[step] + b[step] * gain[step]) ** 2 * variance + s[step] ** 2
    return float(variance)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("EulerDiscrete", {}),
        ("EulerDiscrete", KARRAS),
        ("DDIM", {"clip_sample": False}),
        ("DPMSolverMultistep", {"solver_order": 1}),
        ("FlowMatchEulerDiscrete", {"shift": 3.0}),
    ],
)
def test_both_samplers_have_the_same_end_with_small_steps(
    name: str, config: dict[str, Any]
) -> None:
    """In closed form; twice the steps halve the difference, so that it vanishes with them."""
    made = make_stochastic(scheduler(name, **config))
    few, many = (
        abs(
            end_variance(scheduler(name, **config), None, steps)
            - end_variance(made.scheduler, made.eta, steps)
        )
        for steps in (100, 200)
    )
    assert many < 0.7 * few
    assert many < 0.015


@pytest.mark.parametrize(
    ("kind", "shipped", "by_hand", "eta"),
    [
        ("sd", "EulerDiscrete", "EulerAncestralDiscrete", None),
        pytest.param("sd", "PNDM", "DDIM", 1.0, marks=pytest.mark.exhaustive),
        ("flux", "FlowMatchEulerDiscrete", "FlowMatchEulerDiscrete", 1.0),
    ],
)
def test_one_word_is_the_change_by_hand(
    kind: str,
    shipped: str,
    by_hand: str,
    eta: float | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe, other = pipeline(kind), pipeline(kind)
    pipe.scheduler = scheduler(shipped, **({"skip_prk_steps": True} if shipped == "PNDM" else {}))
    # values that DDIM would take from its own defaults
    changes = {"clip_sample": False, "set_alpha_to_one": False} if by_hand == "DDIM" else {}
    other.scheduler = type(scheduler(by_hand)).from_config(pipe.scheduler.config, **changes)
    before = pipe.scheduler
    with caplog.at_level(logging.WARNING, "mmspec"):
        fast: Any = mmspec.accelerate(pipe, **PLAIN, sampler="stochastic")
    assert "images of a seed differ" in caplog.text
    own: Any = mmspec.accelerate(other, **PLAIN)
    arguments: dict[str, Any] = {} if eta is None else {"eta": eta}
    found, expected = draw(fast, kind, seed=3), draw(own, kind, seed=3, **arguments)
    assert torch.equal(found, expected)
    assert pipe.scheduler is before
    fast.disable()
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(
        draw(fast, kind, generator=generator), draw(pipe, kind, generator=generator.manual_seed(0))
    )  # the pipeline's own sampler
    exact: Any = mmspec.accelerate(pipe, sampler="stochastic")
    assert draw(exact, kind, seed=3).shape == expected.shape
    assert exact.last_stats.exact


def flow_pipeline() -> Any:
    pipe = pipeline("flux")
    pipe.scheduler = scheduler("FlowMatchEulerDiscrete")  # deterministic, as shipped
    return pipe


def test_a_call_may_set_its_own_noise() -> None:
    pipe = flow_pipeline()
    fast, own = (
        mmspec.accelerate(pipe, **PLAIN, sampler="stochastic"),
        mmspec.accelerate(pipe, **PLAIN),
    )
    noises: list[dict[str, Any]] = [{"eta": 0.5}, {"churn": 1.0}]
    for noise in noises:
        assert torch.equal(draw(fast, "flux", seed=0, **noise), draw(own, "flux", seed=0, **noise))


def test_the_sampler_is_saved(tmp_path: Path) -> None:
    pipe = flow_pipeline()
    fast: Any = mmspec.accelerate(pipe, "asd", sampler="stochastic")
    fast.save_pretrained(tmp_path)
    again = mmspec.load(tmp_path, pipe)
    assert torch.equal(draw(again, "flux", seed=0), draw(fast, "flux", seed=0))


def test_what_has_no_counterpart_is_refused() -> None:
    pipe = pipeline("flux")
    with pytest.raises(ValueError, match="sampler='ddim' must be"):
        mmspec.accelerate(pipe, "asd", sampler="ddim")
    with pytest.raises(ValueError, match="'taylorseer' keeps the pipeline's own loop"):
        mmspec.accelerate(pipe, "taylorseer", sampler="stochastic")
    for name in ("LCM", "PNDM"):  # whose first steps are Runge-Kutta, between the levels
        with pytest.raises(ValueError, match=f"{name}Scheduler as configured has no counterpart"):
            make_stochastic(scheduler(name))
