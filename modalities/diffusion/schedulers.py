"""Convert a diffusers scheduler with set timesteps to the kernel of a denoising chain.

A scheduler's `step` handles one state at one timestep, usually with an internal counter, and the
"parallel" schedulers of diffusers use a fixed stride to the previous timestep, which differs from
their own `step` unless the spacing is "leading". So the tables are computed here from the noise
levels of the scheduler's timesteps.

An exact recipe needs stochastic steps. DDPM, DDIM with eta > 0, Euler ancestral, SDE-DPM++ of
orders 1 and 2 and stochastic flow matching have them; a deterministic flow may be run with `eta` or
`churn`, which changes the sampler but not the distribution it approximates. Tolerance rules also
accept deterministic steps: DDIM, Euler in sigma, DPM-Solver++ of orders 1 and 2 and the Euler flow,
all with std 0.
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
    PredictionConverter,
)
from mmspec.targets.continuous.denoising import Prediction


@dataclass(frozen=True)
class Sampler:
    """A scheduler's N steps: kernel, timesteps, and conversion of network inputs and outputs."""

    kernel: GaussianKernel
    timesteps: Tensor  # (N,)
    converter: PredictionConverter
    scale: Tensor | None = None  # (N,), scale of the network's input; None = 1
    is_stochastic: bool = True  # whether the sampler draws noise, at least in longer chains

    def scale_states(self, states: Tensor, step: Tensor) -> Tensor:  # (R, *E), (R,) -> (R, *E)
        """`scale_model_input` with one step per row."""
        return states if self.scale is None else states * at_step(self.scale, step, states)

    def clean(self, raw: Tensor, states: Tensor, step: Tensor) -> Prediction:
        """The prediction from a (guided) output `raw` (R, *E) at `states` (R, *E), `step` (R,).

        Raises ValueError for an output without the shape that the scheduler expects.
        """
        return self.converter(raw, states, step, self.kernel)


def skip_steps(tables: Any, step: int) -> Any:
    """The sampler of the steps from `step` on, for a chain that starts at a later timestep."""
    cut: dict[str, Any] = {}
    for one in fields(tables):
        value = vars(tables)[one.name]
        if isinstance(value, Tensor):
            cut[one.name] = value[step:]
        elif isinstance(value, GaussianKernel | PredictionConverter | PredictedStd):
            cut[one.name] = skip_steps(value, step)
    if cut.get("extrapolation") is not None:  # the first step has nothing before it
        weights = cut["extrapolation"]
        cut["extrapolation"] = weights * (torch.arange(len(weights)) > 0)
    return replace(tables, **cut)


def read_scheduler(
    scheduler: Any,
    eta: float | None = None,
    churn: float | None = None,
    deterministic: bool = False,
) -> Sampler:
    """The sampler of a scheduler after `set_timesteps`.

    `eta`: as in DDIM; for flow matching 1 is the ancestral kernel. `churn`: the noise of a
    stochastic flow (`GaussianKernel.flow_churn`). `deterministic`: accept a chain without noise.
    Raises ValueError for an unknown scheduler, for eta or churn that it does not take, and for a
    deterministic scheduler unless accepted. A chain of a single step may be deterministic anyway.
    """
    for family, read in _READERS.items():  # a subclass may override step
        if isinstance(scheduler, family) and type(scheduler).step is family.step:
            found = read(scheduler, eta, churn)
            if deterministic or found.is_stochastic:
                return found
            raise _deterministic_error(scheduler, _LOSSY)
    raise _unsupported_error(scheduler, deterministic)


def _ddpm(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """DDPM (Ho et al. 2020) on any grid; no noise in a step from timestep 0.

    The variance "fixed_large_log" is treated as "fixed_large"; the step of diffusers takes the root
    of the logarithm there, which is NaN.
    """
    _refuse_arguments(scheduler, eta=eta, churn=churn)
    config, timesteps = scheduler.config, scheduler.timesteps.cpu()
    squared = scheduler.alphas_cumprod.double().cpu()[timesteps]
    levels = _variance_preserving(torch.cat((squared, squared.new_ones(1))))
    kind = scheduler.variance_type
    small, large = GaussianKernel.ancestral(*levels), GaussianKernel.fixed_large(*levels)
    if kind not in _VARIANCES:
        raise ValueError(f"variance_type={kind!r} must be one of {', '.join(_VARIANCES)}")
    kernel = (small if kind.startswith("fixed_small") else large).deterministic(timesteps == 0)
    std = PredictedStd() if kind == "learned" else None
    if kind == "learned_range":
        std = PredictedStd((small.std**2).clamp_min(1e-20), large.std**2)
    converter = PredictionConverter.of(config.prediction_type, levels[0][:-1], levels[1][:-1])
    converter = replace(converter, limit=_limit(config), std=std)
    kernel = replace(kernel, is_predicted=std is not None)
    return Sampler(kernel, scheduler.timesteps, converter)


def _ddim(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """DDIM (Song et al. 2021), whose step leads T // N below its timestep, not to the next one.

    If the clean sample is limited, the noise is still computed from the unlimited one.
    """
    _refuse_arguments(scheduler, churn=churn)
    if scheduler.num_inference_steps is None:
        raise ValueError(f"{type(scheduler).__name__} has no timesteps yet; call set_timesteps")
    config, timesteps = scheduler.config, scheduler.timesteps.cpu()
    table = scheduler.alphas_cumprod.double().cpu()
    final = scheduler.final_alpha_cumprod.double().cpu()
    previous = timesteps - config.num_train_timesteps // scheduler.num_inference_steps
    targets = torch.where(previous >= 0, table[previous.clamp_min(0)], final)
    levels = _variance_preserving(torch.cat((table[timesteps], targets[-1:])))
    landing = _variance_preserving(targets)
    kernel = GaussianKernel.ddim(*levels, _check_eta(eta) if eta else 0.0, landing)
    limit, rest = _limit(config), None
    if limit is not None:
        if bool((kernel.clean == 0).any()):
            raise ValueError(
                "the last step stays at timestep 0, where the clipped clean sample has no effect; "
                "set set_alpha_to_one=True or clip_sample=False"
            )
        rest = landing[0] / kernel.clean
    converter = PredictionConverter.of(config.prediction_type, levels[0][:-1], levels[1][:-1])
    converter = replace(converter, limit=limit, rest=rest)
    return Sampler(kernel, scheduler.timesteps, converter, is_stochastic=bool(eta))


def _euler_ancestral(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """Ancestral Euler steps (Karras et al. 2022 coordinates: x = x0 + sigma eps)."""
    _refuse_arguments(scheduler, eta=eta, churn=churn)
    return _in_sigma(scheduler, 1.0, "epsilon", "v_prediction")


def _euler(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """Euler steps of the probability flow in the same coordinates, equal to DDIM steps."""
    _refuse_arguments(scheduler, eta=eta, churn=churn)
    return _in_sigma(scheduler, 0.0, "epsilon", "v_prediction", "sample")


def _in_sigma(scheduler: Any, eta: float, *kinds: str) -> Sampler:
    sigma = _sigmas(scheduler)
    alpha = torch.ones_like(sigma)
    converter = PredictionConverter.of(_prediction_type(scheduler, *kinds), alpha[:-1], sigma[:-1])
    scale = (sigma[:-1] ** 2 + 1).rsqrt()
    kernel = GaussianKernel.ddim(alpha, sigma, eta)
    return Sampler(kernel, scheduler.timesteps, converter, scale, is_stochastic=bool(eta))


def _dpm(scheduler: Any, eta: float | None, churn: float | None) -> Sampler:
    """DPM-Solver++ of order 1 or 2 (Lu et al. 2022): DDIM's step, and as an SDE the ancestral one.

    Order 2 extrapolates the clean sample from the previous one (`GaussianKernel.continued`).
    """
    config, shares = scheduler.config, {"dpmsolver++": 0.0, "sde-dpmsolver++": 1.0}
    if config.algorithm_type not in shares:
        raise ValueError(
            f"algorithm_type={config.algorithm_type!r} must be one of {', '.join(shares)}; "
            f"set pipe.scheduler = {_SDE}. {_LOSSY_LOOP}"
        )
    share = shares[config.algorithm_type]
    if config.solver_order > 2:
        raise ValueError(
            f"solver_order={config.solver_order} makes a step depend on the last "
            f"{config.solver_order} predictions, but at most two are supported: pipe.scheduler = "
            "DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, solver_order=2); an "
            f'exact recipe needs algorithm_type="sde-dpmsolver++" as well. {_LOSSY_LOOP}'
        )
    _refuse_arguments(scheduler, eta=eta, churn=churn)
    sigma = _sigmas(scheduler)
    alpha = 1 - sigma if config.use_flow_sigmas else (sigma**2 + 1).rsqrt()
    level = sigma if config.use_flow_sigmas else sigma * alpha
    kind = config.prediction_type
    sigma_ = sigma if kind == "flow_prediction" else level  # x0 = x - sigma u always
    converter = PredictionConverter.of(kind, alpha[:-1], sigma_[:-1])
    if kind == "v_prediction":  # x0 = alpha x - sigma v always
        converter = PredictionConverter(alpha[:-1], -level[:-1])
    limit = _threshold(config) if config.thresholding else None
    ignores = kind == "epsilon" and config.variance_type in ("learned", "learned_range")
    converter = replace(converter, limit=limit, ignores_variance=ignores)
    kernel = GaussianKernel.ddim(alpha, level, share)
    if config.solver_order == 2:
        kernel = replace(kernel, extrapolation=_second_order(config, alpha, level))
    return Sampler(kernel, scheduler.timesteps, converter, is_stochastic=bool(share))


def _second_order(config: Any, alpha: Tensor, sigma: Tensor) -> Tensor:  # (N + 1,) x2 -> (N,)
    """Extrapolation weight of each step; 0 for the steps that are first order in diffusers."""
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
        raise ValueError("invert_sigmas=True reverses time, which is not supported")
    t = _sigmas(scheduler)
    options = [name for name, value in (("eta", eta), ("churn", churn)) if value]
    if config.stochastic_sampling:
        options.append("stochastic_sampling")
    if len(options) > 1:
        raise ValueError(f"{' and '.join(options)} each set a stochastic flow; give one of them")
    if eta:
        kernel = GaussianKernel.ddim(1 - t, t, _check_eta(eta))
    elif config.stochastic_sampling:
        kernel = GaussianKernel.flow_renoise(t)
    elif churn and churn < 0:
        raise ValueError(f"churn={churn} must be positive; it scales the noise")
    else:
        kernel = GaussianKernel.flow_churn(t, churn or 0.0)
    converter = PredictionConverter.of("flow_prediction", 1 - t[:-1], t[:-1])
    return Sampler(kernel, scheduler.timesteps, converter, is_stochastic=bool(options))


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
_LOSSY = "Or choose a lossy recipe that keeps the scheduler: paradigms, speca or taylorseer."
_LOSSY_LOOP = "Or choose a lossy recipe that keeps the scheduler: speca or taylorseer."
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


def _deterministic_error(scheduler: Any, lossy: str) -> ValueError:
    name = type(scheduler).__name__
    return ValueError(
        f"{name} as configured has deterministic steps, and an exact recipe needs a stochastic "
        f'sampler: give sampler="stochastic" (--sampler), which changes the images; or '
        f"{_STOCHASTIC[name]}. {lossy}"
    )


def _unsupported_error(scheduler: Any, deterministic: bool) -> ValueError:
    name = type(scheduler).__name__
    if name in _STOCHASTIC and not deterministic:
        return _deterministic_error(scheduler, _LOSSY_LOOP)
    known = ", ".join(family.__name__ for family in _READERS)
    return ValueError(
        f"this recipe does not support {name}; supported schedulers: {known}. {_LOSSY_LOOP}"
    )


def _refuse_arguments(scheduler: Any, **refused: float | None) -> None:
    for name, value in refused.items():
        if value:
            raise ValueError(
                f"{name}={value} is not supported by {type(scheduler).__name__}; leave it out"
            )


def _check_eta(eta: float) -> float:
    if not 0 < eta <= 1:
        raise ValueError(f"eta={eta} must satisfy 0 < eta <= 1; it scales the noise of a step")
    return eta


def _sigmas(scheduler: Any) -> Tensor:  # (N + 1,)
    """The noise levels; log-linear schedules have an unused additional one at the end."""
    levels = len(scheduler.timesteps) + 1
    if len(scheduler.sigmas) < levels or not scheduler.num_inference_steps:
        raise ValueError(f"{type(scheduler).__name__} has no timesteps yet; call set_timesteps")
    sigmas: Tensor = scheduler.sigmas[:levels].double().cpu()
    return sigmas


def _prediction_type(scheduler: Any, *known: str) -> str:
    kind: str = scheduler.config.prediction_type
    if kind not in known:
        raise ValueError(
            f"prediction_type={kind!r} is not supported by {type(scheduler).__name__}; "
            f"use one of {', '.join(known)}"
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
