"""The sampler with noise that stands for a pipeline's deterministic one: `sampler="stochastic"`.

Deterministic samplers solve the probability flow equation of a model, and the samplers below its
reverse stochastic equation (Song et al. 2021, sections 4.3 and D.1). With the exact score and small
steps all states have the same marginal distributions under both; the images of a seed differ.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import diffusers
from torch import Tensor

from mmspec.modalities.diffusion.schedulers import read_scheduler

PROBED_STEPS = 20  # of the grids that are compared
OTHER_IMAGES = "images of a seed differ from the pipeline's own"
TOLERANCE = 0.03  # of a noise level, as schedulers round timesteps and end grids differently


@dataclass(frozen=True)
class StochasticSampler:
    """A scheduler and the `eta` of calls which together draw noise in every step but the last."""

    scheduler: Any
    eta: float | None
    change: str  # from the shipped sampler, for people


@dataclass(frozen=True)
class Counterpart:
    """A scheduler's class, changes of the configuration that it gets, and the eta of calls."""

    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    eta: float | None = None


def make_stochastic(scheduler: Any) -> StochasticSampler:
    """The counterpart with noise of a scheduler, on the same noise levels.

    A scheduler that draws noise already is kept. Raises ValueError for one without a counterpart.
    """
    name = type(scheduler).__name__
    for eta in (None, 1.0):
        if _draws_noise(scheduler, eta):
            change = (
                f"{name} draws noise already, so sampler='stochastic' changes nothing"
                if eta is None
                else f"{name}: its noise levels with eta={eta}; {OTHER_IMAGES}"
            )
            return StochasticSampler(scheduler, eta, change)
    tried: list[str] = []
    for one in _counterparts(scheduler):
        # all values are given, as from_config takes defaults from the new class otherwise
        config = {k: v for k, v in scheduler.config.items() if not k.startswith("_")}
        made = getattr(diffusers, one.kind).from_config(config, **one.changes)
        difference = _compare_levels(scheduler, made)
        if _draws_noise(made, one.eta) and difference < TOLERANCE:
            return StochasticSampler(made, one.eta, _describe(name, one, difference))
        tried.append(one.kind)
    known = f" (tried {', '.join(tried)})" if tried else ""
    raise ValueError(
        f"sampler='stochastic': {name} as configured has no counterpart that draws noise on its "
        f"noise levels{known}; set pipe.scheduler to "
        "one that an exact recipe takes, or choose a lossy recipe: speca or taylorseer"
    )


def _counterparts(scheduler: Any) -> Sequence[Counterpart]:
    """The counterparts to try, the best one first."""
    order = min(scheduler.config.get("solver_order", 1), 2)
    multistep = Counterpart(
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "solver_order": order},
    )
    ancestral = Counterpart("EulerAncestralDiscreteScheduler")
    # the replaced one does not clip, and DDIM does by default
    ddim = Counterpart("DDIMScheduler", {"clip_sample": False}, 1.0)
    flow = Counterpart("FlowMatchEulerDiscreteScheduler", eta=1.0)
    by_name = {
        "DPMSolverMultistep DPMSolverSinglestep UniPCMultistep DEISMultistep": (multistep,),
        "EulerDiscrete HeunDiscrete LMSDiscrete KDPM2Discrete": (ancestral, multistep),
        "PNDM": (ddim,),
        "FlowMatchHeunDiscrete": (flow,),
    }
    name = type(scheduler).__name__.removesuffix("Scheduler")
    return next((found for names, found in by_name.items() if name in names.split()), ())


def _describe(name: str, one: Counterpart, difference: float) -> str:
    same = "the same noise levels" if difference < 1e-3 else f"noise levels within {difference:.1%}"
    options = {**one.changes, **({} if one.eta is None else {"eta": one.eta})}
    given = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"{name} -> {one.kind} ({same}{given}); {OTHER_IMAGES}"


def _draws_noise(scheduler: Any, eta: float | None) -> bool:
    try:
        return read_scheduler(_with_timesteps(scheduler), eta).is_stochastic
    except ValueError:
        return False


def _with_timesteps(scheduler: Any) -> Any:
    """A copy with timesteps set."""
    scheduler = copy.copy(scheduler)
    shifts = scheduler.config.get("use_dynamic_shifting", False)
    scheduler.set_timesteps(PROBED_STEPS, **({"mu": 1.0} if shifts else {}))
    return scheduler


def _compare_levels(scheduler: Any, other: Any) -> float:
    """The largest relative difference of two grids; infinite if one has more levels."""
    levels, others = _levels(scheduler), _levels(other)
    if levels.shape != others.shape:
        return math.inf
    return float((others / levels - 1).abs().max())


def _levels(scheduler: Any) -> Tensor:  # (N,), sigma / alpha, or t of a flow; without the last
    """The noise levels at which the network is called, each once."""
    scheduler = _with_timesteps(scheduler)
    levels: Tensor
    if hasattr(scheduler, "sigmas"):
        levels = scheduler.sigmas.double().cpu()
    else:
        squared = scheduler.alphas_cumprod.double().cpu()[scheduler.timesteps.cpu().long()]
        levels = ((1 - squared) / squared).sqrt()
    levels = levels.unique_consecutive()[:PROBED_STEPS]
    return levels[levels > 0]
