"""Run a diffusers pipeline's own call with its denoising loop replaced.

No code of a pipeline is copied. Its own call encodes the prompt, draws the initial noise and
decodes the result. In between, its loop is traced: the network is a stub with random outputs, and
the scheduler's step returns a random state. This needs no network call, and reveals the arguments
of the network in every step (`call_recorder`) and how guidance branches are combined
(`guidance_fit`). In the last step the chain is sampled, and the pipeline continues with its result.

    pipeline  encode - noise - [ network - guidance - step ] x N - decode
    trace                        stub      fitted     |
                                                      +- in step N: the chain is sampled

Outputs and states are random in every step, with separate seeds. So any dependence on them is
detected and refused, such as guidance that is not a fixed sum of its branches, or a network
argument that depends on the state. A chain may start at a later timestep (image to image), and the
network may read an image next to its latents, the same in all steps. Outputs of a ControlNet are
followed into the network, and steps may call different networks (stages). If conditions or guidance
change from step to step, or latents are overwritten (`inpainting`), a second traced run has to
agree with the first.
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

from mmspec.modalities.diffusion.call_recorder import Recorder, Stages, StubCall
from mmspec.modalities.diffusion.inpainting import InpaintingDetector, PartialDenoiser
from mmspec.modalities.diffusion.network import CONTROL, Network, repeat_states
from mmspec.modalities.diffusion.schedulers import Sampler, read_scheduler, skip_steps
from mmspec.targets.continuous.denoising import Denoiser

_STEP_KEYWORDS = frozenset(("eta", "generator", "return_dict"))
_SEED = 0x5DEECE66D_1B2C5E  # of the random numbers of a trace; unlikely to equal a user's seed


@dataclass(frozen=True)
class PreparedCall:
    """What a pipeline has prepared before its loop."""

    denoiser: Denoiser
    start: Tensor  # (B, *E) float32, the pipeline's initial state
    scale: float  # std of the initial noise
    restore_latents: Callable[
        [Tensor, int], Tensor
    ]  # (B, *E), step -> (B, *F), latents of the pipeline
    timesteps: Tensor  # (N,)
    dtype: torch.dtype  # of the pipeline's latents
    pipe: Any  # a copy of the pipeline with the attributes of this call


SampleChain = Callable[[PreparedCall], Tensor]  # -> (B, *E), the last state


@dataclass(frozen=True)
class NoiseOptions:
    """Options that make a deterministic scheduler stochastic, or allow deterministic steps.

    See `schedulers.sampler`.
    """

    eta: float | None = None
    churn: float | None = None
    deterministic: bool = False


def run_pipeline(
    pipe: Any,
    network: Network,
    arguments: Mapping[str, Any],
    sample_chain: SampleChain,
    noises: NoiseOptions | None = None,
    scheduler: Any = None,
) -> Any:
    """Run the pipeline's own call with `act` in the place of its loop; returns its output.

    `scheduler` is used instead of the pipeline's own. The pipeline is left as it was.
    """
    scheduler_ = pipe.scheduler if scheduler is None else scheduler
    guiders = [name for name, part in pipe.components.items() if isinstance(part, BaseGuidance)]
    stages, inpainting, seeds = (
        Stages(arguments, guiders),
        InpaintingDetector(),
        itertools.count(_SEED),
    )
    reset_generators = _capture_generators(arguments)
    try:
        for last in (False, True):
            trace = _Trace(
                pipe,
                scheduler_,
                network,
                stages,
                inpainting,
                seeds,
                sample_chain,
                noises or NoiseOptions(),
                last,
            )
            try:
                output = trace.stub_pipeline(**arguments)
                break
            except _RetryTrace:
                reset_generators()
    finally:
        pipe.maybe_free_model_hooks()
    if not trace.done:
        raise ValueError(
            f"{type(pipe).__name__} did not take all steps of its scheduler (denoising_end, a "
            "strength of less than one step); leave that out"
        )
    return output


class _RetryTrace(Exception):
    """Stops a traced run that a second run has to confirm."""


def _build_stub_pipeline(pipe: Any, trace: _Trace) -> Any:
    """A copy of the pipeline with stub networks and scheduler."""
    network, stub = trace.network, copy.copy(pipe)
    stand_ins = {
        name: _StubNetwork(getattr(pipe, name), functools.partial(trace.call_network, name))
        for name in network.names
    }
    stub.__dict__ |= {  # setattr would write into the shared configuration
        **stand_ins,
        "scheduler": trace.scheduler,
        "maybe_free_model_hooks": lambda: None,  # called on the pipeline itself at the end
        "_progress_bar_config": {**getattr(pipe, "_progress_bar_config", {}), "disable": True},
    }
    return stub


def _capture_generators(arguments: Mapping[str, Any]) -> Callable[[], None]:
    """A function that resets all random generators of a call to their current state."""
    given = arguments.get("generator")
    generators = given if isinstance(given, list) else [given] if given is not None else []
    states = [one.get_state() for one in generators]
    everywhere = torch.get_rng_state(), torch.cuda.get_rng_state_all()

    def reset_generators() -> None:
        for one, state in zip(generators, states, strict=True):
            one.set_state(state)
        torch.set_rng_state(everywhere[0])
        torch.cuda.set_rng_state_all(everywhere[1])

    return reset_generators


class _Trace:
    """The stubs of one traced run, and their records."""

    def __init__(
        self,
        pipe: Any,
        scheduler: Any,
        network: Network,
        stages: Stages,
        inpainting: InpaintingDetector,
        seeds: Iterator[int],
        sample_chain: SampleChain,
        noises: NoiseOptions,
        is_last: bool,
    ) -> None:
        self.scheduler = copy.copy(scheduler)
        step_stub = _StepStub(self.step_scheduler)
        functools.update_wrapper(step_stub, scheduler.step)  # pipelines inspect its signature
        self.scheduler.step = step_stub  # on the copy
        self.network, self.sample_chain, self.noises = network, sample_chain, noises
        self.stages, self.seeds, self.is_last = stages, seeds, is_last
        self.inpainting = inpainting
        inpainting.begin_run()
        self.made: list[StubCall] = []  # network calls in this step
        self.sampler: Sampler | None = None
        self.start: Tensor | None = None
        self.state: Tensor | None = None  # the latest state passed to the pipeline
        self.images, self.copies = 0, 1  # B, and copies of every state in the pipeline
        self.first_step, self.steps = 0, 0  # first step in the scheduler's grid, and steps so far
        self.done = False
        self.pipe, self.stub_pipeline = pipe, _build_stub_pipeline(pipe, self)

    def call_network(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The stub of a network."""
        call = Recorder(name, args, kwargs).first
        form = self.network.probe_output(call)
        output = form.random(call, next(self.seeds))
        self.made.append(StubCall(name, args, kwargs, output))
        return form.wrap_output(output)

    def step_scheduler(
        self, model_output: Tensor, timestep: Any, sample: Tensor, *rest: Any, **given: Any
    ) -> Any:
        """The stub of the scheduler's step."""
        step, self.steps = self.steps, self.steps + 1
        if step == 0:
            self.first_step = self._find_first_step(timestep)
        self._check_step(step, timestep, rest, given)
        if step == 0:
            self._read_first_step(model_output, sample)
        else:
            assert self.state is not None
            self.inpainting.add(self.state[: self.images], sample[: self.images])
        self._record_step(step, model_output, sample)
        self.made = []
        if "_step_index" in vars(self.scheduler):  # incremented by the replaced step
            self.scheduler._step_index = self.first_step + self.steps
        self.state = self._next(
            sample, self.first_step + self.steps == len(self.scheduler.timesteps)
        )
        state = self.state
        return (state, state) if given.get("return_dict") is False else SchedulerOutput(state)

    def _record_step(self, step: int, raw: Tensor, sample: Tensor) -> None:
        """Record the network calls of a step, and the prediction from their outputs."""
        recorders, fitter = self.stages.find_stage(step, self.made)
        computed = [one.output for one in self.made if one.name == CONTROL]
        for recorder, one in zip(recorders, self.made, strict=True):
            recorder.add(step, one.args, one.kwargs, computed, self.images)
        self._check_states(step, sample, recorders)
        branches = [
            branch
            for recorder, one in zip(recorders, self.made, strict=True)
            if one.name != CONTROL
            for branch in recorder.strip_output(one.output[0]).split(self.images)
        ]
        fitter.add(step, branches, raw[: self.images])

    def _next(self, sample: Tensor, is_end: bool) -> Tensor:
        """The next state of the pipeline: random, and in the last step that of the chain."""
        is_sure = is_end and self.inpainting.is_sure(self.steps) and self.stages.is_sure
        if is_end and not is_sure and not self.is_last:
            raise _RetryTrace
        if is_end:
            prepared = self._prepare_call()
            state, self.done = (
                prepared.restore_latents(self.sample_chain(prepared), self.steps - 1),
                True,
            )
        else:
            generator = torch.Generator(sample.device).manual_seed(next(self.seeds))
            shape = (self.images, *sample.shape[1:])
            state = torch.randn(shape, generator=generator, device=sample.device)
        return state.to(sample.dtype).repeat(self.copies, *(1,) * (sample.dim() - 1))

    def _find_first_step(self, timestep: Any) -> int:
        """The index of the first timestep, which is not 0 if the chain starts from an image."""
        grid = self.scheduler.timesteps.cpu()
        found: list[int] = (grid.double() == float(timestep)).nonzero().flatten().tolist()
        return found[0] if found else 0

    def _check_step(
        self, step: int, timestep: Any, rest: Sequence[Any], given: Mapping[str, Any]
    ) -> None:
        grid = self.scheduler.timesteps[self.first_step :]
        if step >= len(grid) or float(timestep) != float(grid[step]):
            raise ValueError(
                f"the pipeline is at timestep {float(timestep):g} in step {step}, where its "
                "scheduler has another; only steps in the scheduler's order are supported, by "
                "recipes that sample chains: use speca or taylorseer"
            )
        unknown = [name for name in set(given) - _STEP_KEYWORDS if given[name]]
        if rest or unknown:
            raise ValueError(
                "the pipeline passes unsupported arguments to its scheduler's step "
                f"({', '.join(sorted(unknown)) or 'further tensors'}); leave that option out"
            )
        if all(one.name == CONTROL for one in self.made):
            raise ValueError(
                f"the pipeline does not call pipe.{self.network.name} in step {step}; recipes that "
                "sample chains do not support that: use speca or taylorseer"
            )

    def _read_first_step(self, raw: Tensor, sample: Tensor) -> None:
        """Read the number of images, the copies of each, and the sampler from the first step."""
        half = len(raw) // 2  # network outputs are random, so equal halves are copies
        if len(raw) > 1 and len(raw) % 2 == 0 and torch.equal(raw[:half], raw[half:]):
            self.copies = 2
        self.start = sample.clone()  # some pipelines write the next state into it
        self.images = len(sample) // self.copies
        noises = self.noises
        restore = read_scheduler(self.scheduler, noises.eta, noises.churn, noises.deterministic)
        self.sampler = skip_steps(restore, self.first_step) if self.first_step else restore

    def _check_states(self, step: int, sample: Tensor, recorders: Sequence[Recorder]) -> None:
        """Check that the networks get the scaled latents, with constant extra inputs at most."""
        assert self.sampler is not None
        at = torch.full((self.images,), step, device=sample.device)
        expected = self.sampler.scale_states(sample[: self.images].float(), at)
        for recorder in recorders:
            branches, left = divmod(len(recorder.latest_states), self.images)
            if left or not recorder.matches_states(repeat_states(expected, branches)):
                raise ValueError(
                    f"pipe.{recorder.first.name} gets {tuple(recorder.latest_states.shape)} where "
                    f"the latents are {tuple(expected.shape)}, and not these with the same image "
                    "or mask appended in every step; recipes that sample chains do not support "
                    "that: use speca or taylorseer"
                )

    def _prepare_call(self) -> PreparedCall:
        assert self.sampler is not None
        assert self.start is not None
        denoiser = self.stages.denoiser(self.network, self.images, self.sampler)
        scale = float(getattr(self.scheduler, "init_noise_sigma", 1.0))
        start = self.start[: self.images].float()
        rest = (self.sampler.timesteps, self.start.dtype, self._copy_pipeline())
        if self.inpainting.free is None:
            return PreparedCall(denoiser, start, scale, lambda states, step: states, *rest)
        free, known = self.inpainting.split_states(start)
        partial = PartialDenoiser(denoiser, start.shape[1:], free, known)
        rows = torch.arange(self.images, device=start.device)

        def restore(states: Tensor, step: int) -> Tensor:
            return partial.restore_states(states, torch.full_like(rows, step), rows)

        return PreparedCall(partial, start.flatten(1)[:, free], scale, restore, *rest)

    def _copy_pipeline(self) -> Any:
        """A copy of the pipeline with the attributes of this call, and with its own networks."""
        copied = copy.copy(self.stub_pipeline)
        copied.__dict__ |= {name: getattr(self.pipe, name) for name in self.network.names}
        return copied


class _StepStub:
    """The stub of a scheduler's step, which cannot be copied with its scheduler."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ValueError(
            "this pipeline copies its scheduler, one for each part of its state (frames, sound); "
            "recipes that sample chains do not support that: use speca or taylorseer"
        )


class _StubNetwork:
    """A proxy of a module that is an instance of its class but calls another function."""

    def __init__(self, module: Any, call: Callable[..., Any]):
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @property
    def __class__(self) -> Any:
        return type(self._module)

    @__class__.setter
    def __class__(self, value: Any) -> NoReturn:
        raise TypeError("the class of a stub network cannot be set")
