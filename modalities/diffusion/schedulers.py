"""Reads a diffusers scheduler, its timesteps set, into the kernel of a denoising chain.

A scheduler's `step` serves one state at one timestep, mostly with a counter inside, and the
"parallel" schedulers of diffusers take a fixed stride for the previous timestep, which differs from
their own `step` unless the spacing is "leading". So the tables are made here, from the levels of
the scheduler's real grid.

An exact recipe needs steps that draw noise. DDPM, DDIM with eta > 0, Euler ancestral, SDE-DPM++ of
orders 1 and 2 and stochastic flow matching do; a deterministic flow may be run with `eta` or
`churn`, which changes the sampler but not the distribution it approximates. Tolerances judge steps
without noise too: DDIM, Euler in sigma, DPM-Solver++ of orders 1 and 2 and the Euler flow, all of
them one kernel with std 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import diffusers
import torch
from torch import Tensor

from mmspec.distributions.kernels import GaussianKernel, at_step
from mmspec.modalities.diffusion.parameterisation import (
    Clip,
    DynamicThreshold,
    Limit,
    PredictedStd,
    PredictionReading,
)
from mmspec.targets.continuous.denoising import Prediction


@dataclass(frozen=True)
class Sampler:
    """A scheduler's grid of N steps: its kernel, and how to talk to the network there."""

    kernel: GaussianKernel
    timesteps: Tensor  # (N,), what the network is told
    reading: PredictionReading
    scale: Tensor | None = None  # (N,), of the states shown to the network; None = as they are
    draws: bool = True  # whether it is one that draws noise, if only in longer chains

    def scaled(self, states: Tensor, step: Tensor) -> Tensor:  # (R, *E), (R,) -> (R, *E)
        """`scale_model_input`, each row at its own step."""
        return states if self.scale is None else states * at_step(self.scale, step, states)

    def clean(self, raw: Tensor, states: Tensor, step: Tensor) -> Prediction:
        """What a (guided) network output `raw` (R, *E) says in `states` (R, *E) at `step` (R,).

        Raises ValueError where the output has not the shape that the scheduler expects.
        """
        return self.reading(raw, states, step, self.kernel)


def begun_at(tables: Any, step: int) -> Any:
    """A sampler of the steps from `step` on: a chain that is entered in the middle."""
    cut: dict[str, Any] = {}
    for one in fields(tables):
        value = vars(tables)[one.name]
        if isinstance(value, Tensor):
            cut[one.name] = value[step:]
        elif isinstance(value, GaussianKernel | PredictionReading | PredictedStd):
            cut[one.name] = begun_at(value, step)
    if cut.get("ahead") is not None:  # the first step has nothing before it
        cut["ahead"] = cut["ahead"] * (torch.arange(len(cut["ahead"])) > 0)
    return replace(tables, **cut)


def sampler(
    scheduler: Any,
    eta: float | None = None,
    churn: float | None = None,
    deterministic: bool = False,
) -> Sampler:
    """The sampler a scheduler is set to (`set_timesteps` called).

    `eta`: as DDIM's; for flow matching 1 is the ancestral kernel. `churn`: the noise of a
    stochastic flow (`GaussianKernel.flow_churn`). `deterministic`: a chain that never draws noise
    will do. Raises ValueError where the scheduler is unknown, where it takes no eta or churn, or
    where it draws no noise and such a chain will not do. A chain too short for it, of one step,
    may draw no noise all the same.
    """
    for family, read in _READERS.items():  # a subclass may step in its own way
        if isinstance(scheduler, family) and type(scheduler).step is family.step:
            found = read(scheduler, eta, churn)
            if deterministic or found.draws:
                return found
            raise _deterministic(scheduler, _LOSSY)
    raise _unusable(scheduler, deterministic)


def _ddpm(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """DDPM (Ho et al. 2020) on any grid; no noise in a step from timestep 0.

    The variance "fixed_large_log" is read as "fixed_large"; diffusers' own step takes the root of
    the logarithm there, which is not a number.
    """
    _only(scheduler, eta=eta, churn=churn)
    config, timesteps = scheduler.config, scheduler.timesteps.cpu()
    squared = scheduler.alphas_cumprod.double().cpu()[timesteps]
    levels = _variance_preserving(torch.cat((squared, squared.new_ones(1))))
    kind = scheduler.variance_type
    small, large = GaussianKernel.ancestral(*levels), GaussianKernel.fixed_large(*levels)
    if kind not in _VARIANCES:
        raise ValueError(f"variance_type={kind!r} is none of {', '.join(_VARIANCES)}")
    kernel = (small if kind.startswith("fixed_small") else large).deterministic(timesteps == 0)
    std = PredictedStd() if kind == "learned" else None
    if kind == "learned_range":
        std = PredictedStd((small.std**2).clamp_min(1e-20), large.std**2)
    reading = PredictionReading.of(config.prediction_type, levels[0][:-1], levels[1][:-1])
    reading = replace(reading, limit=_limit(config), std=std)
    kernel = replace(kernel, is_predicted=std is not None)
    return Sampler(kernel, scheduler.timesteps, reading)


def _ddim(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """DDIM (Song et al. 2021), whose step aims T // N below its timestep, wherever the next is.

    Where the clean sample is limited, the noise it goes on with is not.
    """
    _only(scheduler, churn=churn)
    if scheduler.num_inference_steps is None:
        raise ValueError(f"{type(scheduler).__name__} has no timesteps yet; call set_timesteps")
    config, timesteps = scheduler.config, scheduler.timesteps.cpu()
    table = scheduler.alphas_cumprod.double().cpu()
    final = scheduler.final_alpha_cumprod.double().cpu()
    previous = timesteps - config.num_train_timesteps // scheduler.num_inference_steps
    aims = torch.where(previous >= 0, table[previous.clamp_min(0)], final)
    levels = _variance_preserving(torch.cat((table[timesteps], aims[-1:])))
    landing = _variance_preserving(aims)
    kernel = GaussianKernel.ddim(*levels, _share(eta) if eta else 0.0, landing)
    limit, rest = _limit(config), None
    if limit is not None:
        if bool((kernel.clean == 0).any()):
            raise ValueError(
                "the last step stays at timestep 0, and clips a clean sample it makes no use of; "
                "set set_alpha_to_one=True or clip_sample=False"
            )
        rest = landing[0] / kernel.clean
    reading = PredictionReading.of(config.prediction_type, levels[0][:-1], levels[1][:-1])
    reading = replace(reading, limit=limit, rest=rest)
    return Sampler(kernel, scheduler.timesteps, reading, draws=bool(eta))


def _euler_ancestral(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """Ancestral Euler steps (Karras et al. 2022 coordinates: x = x0 + sigma eps)."""
    _only(scheduler, eta=eta, churn=churn)
    return _in_sigma(scheduler, 1.0, "epsilon", "v_prediction")


def _euler(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """Euler steps of the probability flow, in the same coordinates, where they are DDIM's."""
    _only(scheduler, eta=eta, churn=churn)
    return _in_sigma(scheduler, 0.0, "epsilon", "v_prediction", "sample")


def _in_sigma(scheduler: Any, eta: float, *kinds: str) -> Sampler:
    sigma = _sigmas(scheduler)
    alpha = torch.ones_like(sigma)
    reading = PredictionReading.of(_kind(scheduler, *kinds), alpha[:-1], sigma[:-1])
    scale = (sigma[:-1] ** 2 + 1).rsqrt()
    kernel = GaussianKernel.ddim(alpha, sigma, eta)
    return Sampler(kernel, scheduler.timesteps, reading, scale, draws=bool(eta))


def _dpm(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """DPM-Solver++ of order 1 or 2 (Lu et al. 2022): DDIM's step, and as an SDE the ancestral one.

    Order 2 moves by a clean sample that goes on from the one before (`GaussianKernel.continued`).
    """
    config, shares = scheduler.config, {"dpmsolver++": 0.0, "sde-dpmsolver++": 1.0}
    if config.algorithm_type not in shares:
        raise ValueError(
            f"algorithm_type={config.algorithm_type!r} is none of {', '.join(shares)}, which are "
            f"read here; set pipe.scheduler = {_SDE}. {_LOSSY_LOOP}"
        )
    share = shares[config.algorithm_type]
    if config.solver_order > 2:
        raise ValueError(
            f"solver_order={config.solver_order} makes a step depend on the last "
            f"{config.solver_order} predictions, of which two are kept here: set pipe.scheduler = "
            "DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, solver_order=2); an "
            f'exact recipe needs algorithm_type="sde-dpmsolver++" as well. {_LOSSY_LOOP}'
        )
    _only(scheduler, eta=eta, churn=churn)
    sigma = _sigmas(scheduler)
    alpha = 1 - sigma if config.use_flow_sigmas else (sigma**2 + 1).rsqrt()
    level = sigma if config.use_flow_sigmas else sigma * alpha
    kind = config.prediction_type
    told = sigma if kind == "flow_prediction" else level  # x0 = x - sigma u always
    reading = PredictionReading.of(kind, alpha[:-1], told[:-1])
    if kind == "v_prediction":  # x0 = alpha x - sigma v always
        reading = PredictionReading(alpha[:-1], -level[:-1])
    limit = _threshold(config) if config.thresholding else None
    ignores = kind == "epsilon" and config.variance_type in ("learned", "learned_range")
    reading = replace(reading, limit=limit, ignores_variance=ignores)
    kernel = GaussianKernel.ddim(alpha, level, share)
    if config.solver_order == 2:
        kernel = replace(kernel, ahead=_second_order(config, alpha, level))
    return Sampler(kernel, scheduler.timesteps, reading, draws=bool(share))


def _second_order(config: Any, alpha: Tensor, sigma: Tensor) -> Tensor:  # (N + 1,) x2 -> (N,)
    """How far a step goes on from the clean sample before: first order where diffusers is."""
    ratio = alpha.log() - sigma.log()
    h = ratio.diff()  # infinite in a step to sigma = 0
    share = torch.cat((h[:1] * 0, h[1:] / h[:-1]))  # 1 / r0
    if config.solver_type == "heun":
        reach = (2.0 if config.algorithm_type.startswith("sde") else 1.0) * h
        share = share * (1 - (1 - (-reach).exp()) / reach) / (1 - (-reach).exp())
    else:
        share = share / 2
    few = config.lower_order_final and len(h) < 15
    if few or config.euler_at_final or config.final_sigmas_type == "zero":
        share[-1] = 0.0
    share[0] = 0.0
    return share


def _flow(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """Flow matching, x = (1 - t) x0 + t eps: Euler, re-noising, DDIM or ancestral steps, churn."""
    config = scheduler.config
    if config.invert_sigmas:
        raise ValueError("invert_sigmas=True runs time backwards, which no kernel here does")
    t = _sigmas(scheduler)
    wanted = [name for name, value in (("eta", eta), ("churn", churn)) if value]
    if config.stochastic_sampling:
        wanted.append("stochastic_sampling")
    if len(wanted) > 1:
        raise ValueError(f"{' and '.join(wanted)} each choose a stochastic flow; give one of them")
    if eta:
        kernel = GaussianKernel.ddim(1 - t, t, _share(eta))
    elif config.stochastic_sampling:
        kernel = GaussianKernel.flow_renoise(t)
    elif churn and churn < 0:
        raise ValueError(f"churn={churn} is negative; it scales the noise, use churn > 0")
    else:
        kernel = GaussianKernel.flow_churn(t, churn or 0.0)
    reading = PredictionReading.of("flow_prediction", 1 - t[:-1], t[:-1])
    return Sampler(kernel, scheduler.timesteps, reading, draws=bool(wanted))


_VARIANCES = (
    "fixed_small",
    "fixed_small_log",
    "fixed_large",
    "fixed_large_log",
    "learned",
    "learned_range",
)
_READERS: dict[Any, Callable[[Any, float | None, float | None], Sampler]] = {
    diffusers.DDPMScheduler: _ddpm,
    diffusers.DDPMParallelScheduler: _ddpm,
    diffusers.DDIMScheduler: _ddim,
    diffusers.DDIMParallelScheduler: _ddim,
    diffusers.EulerAncestralDiscreteScheduler: _euler_ancestral,
    diffusers.EulerDiscreteScheduler: _euler,
    diffusers.DPMSolverMultistepScheduler: _dpm,
    diffusers.FlowMatchEulerDiscreteScheduler: _flow,
}
_LOSSY = "Or choose a recipe that keeps it but is lossy: paradigms, speca or taylorseer."
_LOSSY_LOOP = "Or choose a recipe that keeps it but is lossy: speca or taylorseer."
_SDE = (
    "DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, "
    'algorithm_type="sde-dpmsolver++")'
)
_ANCESTRAL = "EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)"
_STOCHASTIC = {  # how to make each deterministic scheduler draw noise
    f"{name}Scheduler": remedy
    for names, remedy in {
        "DDIM DDIMParallel": "give eta=1.0",
        "DPMSolverMultistep DPMSolverSinglestep DEISMultistep UniPCMultistep": (
            f"set pipe.scheduler = {_SDE}"
        ),
        "EulerDiscrete HeunDiscrete LMSDiscrete KDPM2Discrete": (
            f"set pipe.scheduler = {_ANCESTRAL}"
        ),
        "PNDM": (
            "set pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config) and give eta=1.0"
        ),
        "FlowMatchEulerDiscrete": (
            "give eta=1.0 (ancestral) or churn=1.0, or set stochastic_sampling=True"
        ),
        "FlowMatchHeunDiscrete": (
            "set pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config("
            "pipe.scheduler.config) and give eta=1.0"
        ),
    }.items()
    for name in names.split()
}


def _deterministic(scheduler: Any, lossy: str) -> ValueError:
    name = type(scheduler).__name__
    return ValueError(
        f"{name} as set here draws no noise in its steps, and an exact recipe needs a stochastic "
        f"sampler: {_STOCHASTIC[name]}. {lossy}"
    )


def _unusable(scheduler: Any, deterministic: bool) -> ValueError:
    name = type(scheduler).__name__
    if name in _STOCHASTIC and not deterministic:
        return _deterministic(scheduler, _LOSSY_LOOP)
    known = ", ".join(family.__name__ for family in _READERS)
    return ValueError(
        f"this recipe cannot read {name}; the schedulers it knows are {known}. {_LOSSY_LOOP}"
    )


def _only(scheduler: Any, **refused: float | None) -> None:
    for name, value in refused.items():
        if value:
            raise ValueError(
                f"{name}={value} means nothing to {type(scheduler).__name__}; leave it out"
            )


def _share(eta: float) -> float:
    if not 0 < eta <= 1:
        raise ValueError(f"eta={eta} is no share of the noise of the next state; use 0 < eta <= 1")
    return eta


def _sigmas(scheduler: Any) -> Tensor:  # (N + 1,)
    """The levels of the grid; log-linear ones have one more at the end, which no step reaches."""
    levels = len(scheduler.timesteps) + 1
    if len(scheduler.sigmas) < levels or not scheduler.num_inference_steps:
        raise ValueError(f"{type(scheduler).__name__} has no timesteps yet; call set_timesteps")
    sigmas: Tensor = scheduler.sigmas[:levels].double().cpu()
    return sigmas


def _kind(scheduler: Any, *known: str) -> str:
    kind: str = scheduler.config.prediction_type
    if kind not in known:
        raise ValueError(
            f"prediction_type={kind!r} is not possible with {type(scheduler).__name__}; "
            f"it knows {', '.join(known)}"
        )
    return kind


def _variance_preserving(squared: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and sigma from alpha^2."""
    return squared.sqrt(), (1 - squared).sqrt()


def _limit(config: Any) -> Limit | None:
    if config.thresholding:
        return _threshold(config)
    return Clip(config.clip_sample_range) if config.clip_sample else None


def _threshold(config: Any) -> DynamicThreshold:
    return DynamicThreshold(config.dynamic_thresholding_ratio, config.sample_max_value)
