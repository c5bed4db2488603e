"""Runs a diffusers pipeline's own call with another loop inside.

Nothing of a pipeline is copied here. Its own call encodes the prompt, draws the first noise and
decodes the result; in between, its loop is rehearsed: the network is a stand-in that returns random
numbers, the scheduler's step returns the state it was given. That costs no network call, and shows
what the network is told at every step (`conditions`) and how the branches of guidance become one
prediction (`branches`). In the last step the chain is sampled, and the pipeline goes on with it.

    pipeline  encode - noise - [ network - guidance - step ] x N - decode
    here                         stand-in  fitted     |
                                                      +- in step N: the chain is sampled

Pipelines that look at more than the latents, or change them between steps, are found out in the
rehearsal and refused: image conditions, inpainting, ControlNet, a start in mid-chain.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from mmspec.modalities.diffusion.conditions import Recorder
from mmspec.modalities.diffusion.guidance_fit import Fitter
from mmspec.modalities.diffusion.network import Network, PipelineDenoiser, repeated
from mmspec.modalities.diffusion.schedulers import Sampler, sampler

_STEP_KEYWORDS = frozenset(("eta", "generator", "return_dict"))


@dataclass(frozen=True)
class PreparedCall:
    """What a pipeline has prepared when its loop begins."""

    denoiser: PipelineDenoiser
    start: Tensor  # (B, *E) float32, the first state as the pipeline drew it
    scale: float  # the std of that noise


Perform = Callable[[PreparedCall], Tensor]  # -> (B, *E), the last state


@dataclass(frozen=True)
class Noises:
    """What makes a deterministic scheduler stochastic, or that it may stay `quiet`.

    See `schedulers.sampler`.
    """

    eta: float | None = None
    churn: float | None = None
    quiet: bool = False


def perform(
    pipe: Any,
    network: Network,
    arguments: Mapping[str, Any],
    act: Perform,
    noises: Noises | None = None,
    scheduler: Any = None,
) -> Any:
    """Run the pipeline's own call with `act` in the place of its loop; returns its output.

    `scheduler` is used instead of the pipeline's own. The pipeline is left as it was.
    """
    plain = pipe.scheduler if scheduler is None else scheduler
    rehearsal = _Rehearsal(plain, network, arguments, act, noises or Noises())
    shadow = copy.copy(pipe)
    shadow.__dict__ |= {  # not by setattr, which would write into the shared configuration
        network.name: _StandIn(network.module, rehearsal.called),
        "scheduler": rehearsal.scheduler,
        "maybe_free_model_hooks": lambda: None,  # the pipeline itself does that, below
        "_progress_bar_config": {**getattr(pipe, "_progress_bar_config", {}), "disable": True},
    }
    try:
        output = shadow(**arguments)
    finally:
        pipe.maybe_free_model_hooks()
    if not rehearsal.done:
        raise ValueError(
            f"{type(pipe).__name__} did not take all steps of its scheduler (denoising_end, "
            "interrupt); leave that out"
        )
    return output


class _Rehearsal:
    """The stand-ins of one call, and what they see."""

    def __init__(
        self,
        scheduler: Any,
        network: Network,
        arguments: Mapping[str, Any],
        act: Perform,
        noises: Noises,
    ) -> None:
        self.scheduler = copy.copy(scheduler)
        stepped = functools.partial(self.stepped)
        functools.update_wrapper(stepped, scheduler.step)  # pipelines read its signature
        self.scheduler.step = stepped  # on the copy
        self.network, self.act, self.noises = network, act, noises
        self.fitter = Fitter(arguments)
        self.recorders: list[Recorder] = []  # one per network call of a step
        self.outputs: list[Tensor] = []  # what each returns
        self.sampler: Sampler | None = None
        self.start: Tensor | None = None
        self.images, self.copies = 0, 1  # B, and how often the pipeline carries every state
        self.made = 0  # network calls of this step
        self.steps = 0
        self.done = False

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The network's stand-in."""
        place, self.made = self.made, self.made + 1
        if self.steps == 0:
            recorder = Recorder(args, kwargs)
            outline = self.network.learn(recorder.first)
            self.recorders.append(recorder)
            self.outputs.append(outline.random(recorder.first, place))
        elif place < len(self.recorders):
            self.recorders[place].add(args, kwargs)
        else:
            raise self._uneven()
        assert self.network.outline is not None
        return self.network.outline.wrapped(self.outputs[place])

    def stepped(
        self, model_output: Tensor, timestep: Any, sample: Tensor, *rest: Any, **given: Any
    ) -> Any:
        """The scheduler's step."""
        step, self.steps = self.steps, self.steps + 1
        grid = self.scheduler.timesteps
        self._check_step(step, timestep, rest, given)
        if step == 0:
            self._open(model_output, sample)
        assert self.start is not None
        if self.start is not sample and not torch.equal(self.start, sample):
            raise ValueError(
                "this pipeline changes its latents between steps (as inpainting does), which "
                "cannot be done in parallel; use it without a mask"
            )
        branches = [part for out in self.outputs for part in out.split(self.images)]
        self.fitter.add(branches, model_output[: self.images])
        state = sample
        if step == len(grid) - 1:
            last = self.act(self._opening())
            state = last.to(sample.dtype).repeat(self.copies, *(1,) * (last.dim() - 1))
            self.done = True
        return (state, state) if given.get("return_dict") is False else SchedulerOutput(state)

    def _check_step(
        self, step: int, timestep: Any, rest: Sequence[Any], given: Mapping[str, Any]
    ) -> None:
        grid = self.scheduler.timesteps
        if step >= len(grid) or float(timestep) != float(grid[step]):
            raise ValueError(
                f"the pipeline is at timestep {float(timestep):g} in step {step}, where its "
                "scheduler has another; only whole chains from pure noise are supported, so leave "
                "out strength, denoising_start and denoising_end"
            )
        unknown = [name for name in set(given) - _STEP_KEYWORDS if given[name]]
        if rest or unknown:
            raise ValueError(
                f"the pipeline gives its scheduler's step more than is understood here "
                f"({', '.join(sorted(unknown)) or 'further tensors'}); leave that option out"
            )
        if self.made != len(self.recorders) or not self.made:
            raise self._uneven()
        self.made = 0

    def _uneven(self) -> ValueError:
        return ValueError(
            f"the pipeline calls pipe.{self.network.name} {len(self.recorders)} times in its first "
            "step and not in another (as staged networks, skipped layers and guidance intervals "
            "do); all steps must be alike, so leave that feature out"
        )

    def _open(self, raw: Tensor, sample: Tensor) -> None:
        """Read the first step: how many images, how often each is carried, and what is shown."""
        half = len(raw) // 2  # the network's numbers are random: equal halves are copies
        if len(raw) > 1 and len(raw) % 2 == 0 and torch.equal(raw[:half], raw[half:]):
            self.copies = 2
        self.start, self.images = sample, len(sample) // self.copies
        noises = self.noises
        self.sampler = sampler(self.scheduler, noises.eta, noises.churn, noises.quiet)
        first = torch.zeros(self.images, dtype=torch.int64, device=sample.device)
        expected = self.sampler.scaled(sample[: self.images].float(), first)
        for recorder in self.recorders:
            shown = recorder.first.shown
            branches, left = divmod(len(shown), self.images)
            fits = not left and shown.shape[1:] == expected.shape[1:]
            wanted = repeated(expected, branches)
            if not fits or not torch.allclose(
                shown.float(), wanted, rtol=2e-2, atol=2e-2, equal_nan=True
            ):
                raise ValueError(
                    f"the network sees {tuple(shown.shape)} where the latents are "
                    f"{tuple(expected.shape)}, or other numbers than these: it is shown more than "
                    "the latents (an image, a mask), and such pipelines are not supported"
                )

    def _opening(self) -> PreparedCall:
        assert self.sampler is not None
        assert self.start is not None
        calls = tuple(recorder.call() for recorder in self.recorders)
        denoiser = PipelineDenoiser(
            self.network, calls, self.images, self.fitter.join(), self.sampler
        )
        scale = float(getattr(self.scheduler, "init_noise_sigma", 1.0))
        return PreparedCall(denoiser, self.start[: self.images].float(), scale)


class _StandIn:
    """Looks like a module in every way, but calls something else."""

    def __init__(self, module: Any, called: Callable[[tuple[Any, ...], dict[str, Any]], Any]):
        self._module, self._called = module, called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @property
    def __class__(self) -> Any:
        return type(self._module)

    @__class__.setter
    def __class__(self, value: Any) -> NoReturn:
        raise TypeError("a stand-in keeps its class")
