"""Run a diffusers pipeline with a recipe that samples chains.

The latents are sampled in speculative rounds instead of the pipeline's loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from mmspec.decode import Parts
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.drafters.denoising.freeze import FREEZES
from mmspec.drafters.denoising.frozen import ROOTS
from mmspec.drafters.denoising.window import Window
from mmspec.errors import check_number, choose_option
from mmspec.modalities.diffusion.network import (
    Network,
    check_network,
    check_scheduler,
    count_images,
)
from mmspec.modalities.diffusion.pipeline_trace import NoiseOptions, PreparedCall, run_pipeline
from mmspec.modalities.diffusion.step_callback import StepCallback, StepObserver
from mmspec.modalities.diffusion.tracing import StateDecoder
from mmspec.modality import Call, Loop
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.targets.continuous.denoising import ChainRequest, ChainTarget, Denoiser
from mmspec.targets.continuous.split_rows import SplitRows
from mmspec.targets.stop import Stop

CALLS_AT_LEAST = 3  # of a chain


class ChainRunner:
    """A pipeline whose latents are decoded by a recipe, optionally with a draft pipeline.

    Recipes are bound per call: the target holds the call's conditions and timesteps. `eta` is that
    of calls that give neither eta nor churn.
    """

    own = ("seed", "row_ids", "eta", "churn")
    measured: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        pipe: Any,
        recipe: Recipe,
        small: Any,
        max_rows: int | SplitRows | None,
        eta: float | None = None,
    ) -> None:
        self.pipe, self.recipe, self.small, self.max_rows = pipe, recipe, small, max_rows
        self.eta, self.warned = eta, False
        for one in (pipe, small):
            if one is not None:
                check_network(one)
        assert isinstance(recipe.execution, Window)
        for name, known in (("freeze", FREEZES), ("root", ROOTS)):
            if name in recipe.options:
                choose_option(name, recipe.options[name], known)
        self.deterministic = recipe.execution.deterministic
        check_scheduler(pipe.scheduler, self.deterministic)
        self.network = Network(pipe)
        self.draft_network = None if small is None else Network(small)
        self.sees = "nothing" if small is None else recipe.sees

    def count_fewest(self, steps: int) -> int:
        """The fewest calls: the first step, one window, and the last step, which has no noise.

        A window of one is plain sampling, which is not meant to save any.
        """
        assert isinstance(self.recipe.execution, Window)
        return 0 if self.recipe.execution.max_states == 1 else min(steps, CALLS_AT_LEAST)

    def run(self, given: Mapping[str, Any], own: Mapping[str, Any], loop: Loop) -> Any:
        """The pipeline's output for its arguments `given`."""
        given = dict(given)
        watch = StepCallback.of(given)
        if own["seed"] is not None and given.get("generator") is not None:
            raise ValueError("seed= and generator= both set the noise; give one of them")
        given = _add_generator(given, own)
        eta = given.get("eta") if own["eta"] is None else own["eta"]
        if own["eta"] is None and not eta and own["churn"] is None:
            eta = self.eta
        for name, value in (("eta", eta), ("churn", own["churn"])):
            if value is not None:
                check_number(name, value, 0, example=1.0)
        noises, rows_before = NoiseOptions(eta, own["churn"], self.deterministic), list[int]()

        def sample(prepared: PreparedCall) -> Tensor:
            target = self._target(prepared.denoiser)
            small = self._draft_target(prepared, given, noises)
            request = _request(prepared, own, given)
            rows_before.append(self.network.rows)
            shown = (self.pipe, self.network, given, noises, prepared.timesteps)
            call = replace(self._call(target, small, request), states=StateDecoder(*shown))
            return self._sample_chain(call, request.start, loop, watch.observe(prepared))

        output = run_pipeline(self.pipe, self.network, given, sample, noises)
        loop.report(replace(loop.stats(), network_rows=self.network.rows - rows_before[0]))
        return output

    def _target(self, denoiser: Denoiser) -> ChainTarget:
        if isinstance(self.max_rows, SplitRows):
            return self.max_rows.target(denoiser)
        return ChainTarget(denoiser, self.max_rows)

    def _call(self, target: ChainTarget, small: ChainTarget | None, request: ChainRequest) -> Call:
        """Bind the recipe to this request."""
        recipe = self.recipe
        kit = Kit(target, small, recipe.execution, recipe.sees, None, recipe.options)
        verifier = resolve(recipe.verifier, kit)
        gate = None if recipe.gate is None else resolve(recipe.gate, kit)
        drafter = pair(recipe.architecture(kit), verifier, target)
        parts = Parts(target, drafter, verifier, Stop(target.denoiser.kernel.num_steps), gate)
        return Call(parts, request, replace(recipe, verifier=verifier, gate=gate))

    def _draft_target(
        self, prepared: PreparedCall, given: Mapping[str, Any], noises: NoiseOptions
    ) -> ChainTarget | None:
        """The draft pipeline's network with the same arguments, on the target's timesteps."""
        if self.draft_network is None:
            return None
        drafted = _prepare_draft_call(
            self.small, self.draft_network, self.pipe.scheduler, given, noises
        )
        if drafted.start.shape != prepared.start.shape:
            raise ValueError(
                f"the draft pipeline's latents are {tuple(drafted.start.shape)} and the target's "
                f"{tuple(prepared.start.shape)}; give a draft pipeline of their size"
            )
        rows = self.max_rows  # every process drafts for itself
        return ChainTarget(drafted.denoiser, rows.max_rows if isinstance(rows, SplitRows) else rows)

    def _sample_chain(self, call: Call, start: Tensor, loop: Loop, watch: StepObserver) -> Tensor:
        """The last states (B, *E); reports each step once all images have passed it."""
        pending: list[list[Tensor]] = [[] for _ in start]  # states not reported yet
        with self.pipe.progress_bar(total=call.parts.stop.max_new_tokens) as bar:
            for round_ in loop(call):
                for row, new in zip(pending, round_.tokens, strict=True):
                    row += new
                while all(pending):
                    start = torch.stack([row.pop(0) for row in pending])
                    watch(start)
                    bar.update(1)
        return start


def _request(
    prepared: PreparedCall, own: Mapping[str, Any], given: Mapping[str, Any]
) -> ChainRequest:
    """The initial states, and the noise of all later states."""
    start, generator = prepared.start, given.get("generator")
    batch, device = start.shape[0], start.device
    seed, row_ids = own["seed"], own["row_ids"]
    if seed is not None:
        generator = None
    if isinstance(generator, list) and row_ids is None:
        row_ids = [_draw_seed(one) for one in generator]
        seed = 0
    elif generator is not None:
        seed = _draw_seed(generator[0] if isinstance(generator, list) else generator)
    elif seed is None:
        seed = fresh_seed()
    noise = KeyedNoise.from_seed(seed, batch, device, row_ids)
    if generator is None and not _has_initial_image(given):
        at = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        start = noise.shared_keys(at).normal(*start.shape[1:])[:, 0] * prepared.scale
    return ChainRequest(start, noise)


def _has_initial_image(given: Mapping[str, Any]) -> bool:
    """Whether the initial state may be more than noise: an argument is an image or latents."""
    parts = ("image", "video", "latents")
    named = {name: value for name, value in given.items() if any(part in name for part in parts)}
    return any(not isinstance(value, int | float | str | None) for value in named.values())


def _add_generator(given: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add a generator for the pipeline's own noise to the arguments of a call with a seed.

    If the pipeline starts from a user's image, each row gets a generator with its own seed. If the
    arguments do not determine the number of rows, all share one generator and `row_ids` are
    refused.
    """
    count, seed, ids = count_images(given), own["seed"], own["row_ids"]
    if seed is None:
        return given
    elsewhere = _has_initial_image(given)
    if elsewhere and count is None and ids is not None:
        raise ValueError(
            f"row_ids={ids} need one id per image, and the arguments of this pipeline do not "
            "determine the number of images before it runs; drop row_ids="
        )
    if count is None or not elsewhere:
        return {**given, "generator": torch.Generator().manual_seed(int(seed) % 2**62)}
    rows = KeyedNoise.from_seed(seed, count, torch.device("cpu"), ids).rows
    seeds = [row % 2**62 for row in rows.tolist()]
    return {**given, "generator": [torch.Generator().manual_seed(row) for row in seeds]}


def _draw_seed(generator: torch.Generator) -> int:
    """Draw a seed from a generator."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


class _DraftPrepared(Exception):
    """Stops a draft pipeline before its loop, with the prepared call."""

    def __init__(self, prepared: PreparedCall) -> None:
        super().__init__()
        self.opening = prepared


def _prepare_draft_call(
    small: Any, network: Network, scheduler: Any, given: Mapping[str, Any], noises: NoiseOptions
) -> PreparedCall:
    """The prepared call of a draft pipeline for the same arguments, on the target's timesteps."""

    def stop(prepared: PreparedCall) -> NoReturn:
        raise _DraftPrepared(prepared)

    known = inspect.signature(small.__call__).parameters
    own = {"generator": torch.Generator().manual_seed(0)}  # its noise is not used
    arguments = {name: value for name, value in {**given, **own}.items() if name in known}
    try:
        run_pipeline(small, network, arguments, stop, noises, scheduler)
    except _DraftPrepared as prepared:
        return prepared.opening
    raise AssertionError("the draft pipeline never reached its loop")
