"""Runs a diffusers pipeline's own call with another loop inside.

Nothing of a pipeline is copied here. Its own call encodes the prompt, draws the first noise and
decodes the result; in between, its loop is rehearsed: the network is a stand-in that returns random
numbers, the scheduler's step returns a random state. That costs no network call, and shows what the
network is told at every step (`call_recorder`) and how the branches of guidance become one
prediction (`guidance_fit`). In the last step the chain is sampled; the pipeline goes on with it.

    pipeline  encode - noise - [ network - guidance - step ] x N - decode
    here                         stand-in  fitted     |
                                                      +- in step N: the chain is sampled

Outputs and states are drawn anew in every step, from seeds of our own: what depends on them is
found out and refused, such as guidance that is no fixed sum of its branches, or a network that is
told something about its state. A chain may begin in the middle of the grid (image to image), and
the network may see a picture beside its latents, the same one in all steps. What a ControlNet
computes is followed into the network, and steps may call other networks than others (`stages`).
Where conditions or guidance change from step to step, or a picture is pasted into the latents
(`inpainting`), a second rehearsal has to agree with the first.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from diffusers.guiders import BaseGuidance
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from mmspec.modalities.diffusion.call_recorder import Recorder
from mmspec.modalities.diffusion.inpainting import PartialDenoiser, Pasting
from mmspec.modalities.diffusion.network import CONTROL, Network, repeated
from mmspec.modalities.diffusion.schedulers import Sampler, begun_at, sampler
from mmspec.modalities.diffusion.stages import Made, Stages
from mmspec.targets.continuous.denoising import Denoiser

_STEP_KEYWORDS = frozenset(("eta", "generator", "return_dict"))
_SEED = 0x5DEECE66D_1B2C5E  # of the numbers of a rehearsal: nobody else's, so none are the latents


@dataclass(frozen=True)
class PreparedCall:
    """What a pipeline has prepared when its loop begins."""

    denoiser: Denoiser
    start: Tensor  # (B, *E) float32, the first state as the pipeline drew it
    scale: float  # the std of that noise
    whole: Callable[[Tensor, int], Tensor]  # (B, *E), step -> (B, *F), latents of the pipeline
    timesteps: Tensor  # (N,)
    dtype: torch.dtype  # of the pipeline's latents
    pipe: Any  # a copy of the pipeline as this call has set it


Perform = Callable[[PreparedCall], Tensor]  # -> (B, *E), the last state


@dataclass(frozen=True)
class Noises:
    """What makes a deterministic scheduler stochastic, or that it may stay as it is.

    See `schedulers.sampler`.
    """

    eta: float | None = None
    churn: float | None = None
    deterministic: bool = False


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
    guiders = [name for name, part in pipe.components.items() if isinstance(part, BaseGuidance)]
    stages, pasting, seeds = Stages(arguments, guiders), Pasting(), itertools.count(_SEED)
    rewind = _rewinding(arguments)
    try:
        for last in (False, True):
            rehearsal = _Rehearsal(
                pipe, plain, network, stages, pasting, seeds, act, noises or Noises(), last
            )
            try:
                output = rehearsal.shadow(**arguments)
                break
            except _Again:
                rewind()
    finally:
        pipe.maybe_free_model_hooks()
    if not rehearsal.done:
        raise ValueError(
            f"{type(pipe).__name__} did not take all steps of its scheduler (denoising_end, a "
            "strength of less than one step); leave that out"
        )
    return output


class _Again(Exception):
    """Leaves a rehearsal that another one has to confirm."""


def _shadow(pipe: Any, rehearsal: _Rehearsal) -> Any:
    """The pipeline with stand-ins."""
    network, shadow = rehearsal.network, copy.copy(pipe)
    stand_ins = {
        name: _StandIn(getattr(pipe, name), functools.partial(rehearsal.called, name))
        for name in network.names
    }
    shadow.__dict__ |= {  # not by setattr, which would write into the shared configuration
        **stand_ins,
        "scheduler": rehearsal.scheduler,
        "maybe_free_model_hooks": lambda: None,  # the pipeline itself does that, at the end
        "_progress_bar_config": {**getattr(pipe, "_progress_bar_config", {}), "disable": True},
    }
    return shadow


def _rewinding(arguments: Mapping[str, Any]) -> Callable[[], None]:
    """Sets all random generators of a call back to where they stand now."""
    given = arguments.get("generator")
    generators = given if isinstance(given, list) else [given] if given is not None else []
    states = [one.get_state() for one in generators]
    everywhere = torch.get_rng_state(), torch.cuda.get_rng_state_all()

    def rewind() -> None:
        for one, state in zip(generators, states, strict=True):
            one.set_state(state)
        torch.set_rng_state(everywhere[0])
        torch.cuda.set_rng_state_all(everywhere[1])

    return rewind


class _Rehearsal:
    """The stand-ins of one call, and what they see."""

    def __init__(
        self,
        pipe: Any,
        scheduler: Any,
        network: Network,
        stages: Stages,
        pasting: Pasting,
        seeds: Iterator[int],
        act: Perform,
        noises: Noises,
        is_last: bool,
    ) -> None:
        self.scheduler = copy.copy(scheduler)
        stepped = functools.partial(self.stepped)
        functools.update_wrapper(stepped, scheduler.step)  # pipelines read its signature
        self.scheduler.step = stepped  # on the copy
        self.network, self.act, self.noises = network, act, noises
        self.stages, self.seeds, self.is_last = stages, seeds, is_last
        self.pasting = pasting
        pasting.begin()
        self.made: list[Made] = []  # calls of networks in this step
        self.sampler: Sampler | None = None
        self.start: Tensor | None = None
        self.state: Tensor | None = None  # what the pipeline was given last
        self.images, self.copies = 0, 1  # B, and how often the pipeline carries every state
        self.begun, self.steps = 0, 0  # where in the scheduler's grid, and steps taken
        self.done = False
        self.pipe, self.shadow = pipe, _shadow(pipe, self)

    def called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The stand-in of a network."""
        call = Recorder(name, args, kwargs).first
        form = self.network.learn(call)
        output = form.random(call, next(self.seeds))
        self.made.append(Made(name, args, kwargs, output))
        return form.wrapped(output)

    def stepped(
        self, model_output: Tensor, timestep: Any, sample: Tensor, *rest: Any, **given: Any
    ) -> Any:
        """The scheduler's step."""
        step, self.steps = self.steps, self.steps + 1
        if step == 0:
            self.begun = self._place(timestep)
        self._check_step(step, timestep, rest, given)
        if step == 0:
            self._open(model_output, sample)
        else:
            assert self.state is not None
            self.pasting.add(self.state[: self.images], sample[: self.images])
        self._note(step, model_output, sample)
        self.made = []
        if "_step_index" in vars(self.scheduler):  # counted by the step that we replace
            self.scheduler._step_index = self.begun + self.steps
        self.state = self._next(sample, self.begun + self.steps == len(self.scheduler.timesteps))
        state = self.state
        return (state, state) if given.get("return_dict") is False else SchedulerOutput(state)

    def _note(self, step: int, raw: Tensor, sample: Tensor) -> None:
        """What the networks were told in a step, and what was made of their outputs."""
        recorders, fitter = self.stages.of(step, self.made)
        computed = [one.output for one in self.made if one.name == CONTROL]
        for recorder, one in zip(recorders, self.made, strict=True):
            recorder.add(step, one.args, one.kwargs, computed, self.images)
        self._check_shown(step, sample, recorders)
        branches = [
            branch
            for recorder, one in zip(recorders, self.made, strict=True)
            if one.name != CONTROL
            for branch in recorder.flat(one.output[0]).split(self.images)
        ]
        fitter.add(step, branches, raw[: self.images])

    def _next(self, sample: Tensor, is_end: bool) -> Tensor:
        """The state that the pipeline is given: a random one, and at the end that of the chain."""
        is_sure = is_end and self.pasting.is_sure(self.steps) and self.stages.is_sure
        if is_end and not is_sure and not self.is_last:
            raise _Again
        if is_end:
            opening = self._opening()
            state, self.done = opening.whole(self.act(opening), self.steps - 1), True
        else:
            generator = torch.Generator(sample.device).manual_seed(next(self.seeds))
            shape = (self.images, *sample.shape[1:])
            state = torch.randn(shape, generator=generator, device=sample.device)
        return state.to(sample.dtype).repeat(self.copies, *(1,) * (sample.dim() - 1))

    def _place(self, timestep: Any) -> int:
        """Where the chain begins: later than at the first timestep, if it starts from a picture."""
        grid = self.scheduler.timesteps.cpu()
        found: list[int] = (grid.double() == float(timestep)).nonzero().flatten().tolist()
        return found[0] if found else 0

    def _check_step(
        self, step: int, timestep: Any, rest: Sequence[Any], given: Mapping[str, Any]
    ) -> None:
        grid = self.scheduler.timesteps[self.begun :]
        if step >= len(grid) or float(timestep) != float(grid[step]):
            raise ValueError(
                f"the pipeline is at timestep {float(timestep):g} in step {step}, where its "
                "scheduler has another; only steps in the scheduler's order are supported, by "
                "recipes that sample chains: use speca or taylorseer"
            )
        unknown = [name for name in set(given) - _STEP_KEYWORDS if given[name]]
        if rest or unknown:
            raise ValueError(
                f"the pipeline gives its scheduler's step more than is understood here "
                f"({', '.join(sorted(unknown)) or 'further tensors'}); leave that option out"
            )
        if all(one.name == CONTROL for one in self.made):
            raise ValueError(
                f"the pipeline does not call pipe.{self.network.name} in step {step}; recipes that "
                "sample chains do not support that: use speca or taylorseer"
            )

    def _open(self, raw: Tensor, sample: Tensor) -> None:
        """Read the first step: how many images, how often each is carried, and what is shown."""
        half = len(raw) // 2  # the network's numbers are random: equal halves are copies
        if len(raw) > 1 and len(raw) % 2 == 0 and torch.equal(raw[:half], raw[half:]):
            self.copies = 2
        self.start = sample
        self.images = len(sample) // self.copies
        noises = self.noises
        whole = sampler(self.scheduler, noises.eta, noises.churn, noises.deterministic)
        self.sampler = begun_at(whole, self.begun) if self.begun else whole

    def _check_shown(self, step: int, sample: Tensor, recorders: Sequence[Recorder]) -> None:
        """The networks must see the latents as the scheduler scales them, and nothing else."""
        assert self.sampler is not None
        at = torch.full((self.images,), step, device=sample.device)
        expected = self.sampler.scaled(sample[: self.images].float(), at)
        for recorder in recorders:
            branches, left = divmod(len(recorder.shown), self.images)
            if left or not recorder.shows(repeated(expected, branches)):
                raise ValueError(
                    f"pipe.{recorder.first.name} sees {tuple(recorder.shown.shape)} where the "
                    f"latents are {tuple(expected.shape)}, and not these with the same picture or "
                    "mask behind them in every step; recipes that sample chains do not support "
                    "that: use speca or taylorseer"
                )

    def _opening(self) -> PreparedCall:
        assert self.sampler is not None
        assert self.start is not None
        denoiser = self.stages.denoiser(self.network, self.images, self.sampler)
        scale = float(getattr(self.scheduler, "init_noise_sigma", 1.0))
        start = self.start[: self.images].float()
        rest = (self.sampler.timesteps, self.start.dtype, self._as_called())
        if self.pasting.free is None:
            return PreparedCall(denoiser, start, scale, lambda states, step: states, *rest)
        free, known = self.pasting.known(start)
        partial = PartialDenoiser(denoiser, start.shape[1:], free, known)
        rows = torch.arange(self.images, device=start.device)

        def whole(states: Tensor, step: int) -> Tensor:
            return partial.whole(states, torch.full_like(rows, step), rows)

        return PreparedCall(partial, start.flatten(1)[:, free], scale, whole, *rest)

    def _as_called(self) -> Any:
        """A copy of the pipeline with what its call has set, and with its own networks."""
        made = copy.copy(self.shadow)
        made.__dict__ |= {name: getattr(self.pipe, name) for name in self.network.names}
        return made


class _StandIn:
    """Looks like a module in every way, but calls something else."""

    def __init__(self, module: Any, called: Callable[..., Any]):
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
