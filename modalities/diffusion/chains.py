"""Samples the latents of a diffusers pipeline in rounds: the chain in the place of its loop."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from mmspec.decode import Parts
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.drafters.denoising.window import Window
from mmspec.errors import check_number
from mmspec.modalities.diffusion.network import (
    Network,
    check_network,
    check_scheduler,
    pictures,
)
from mmspec.modalities.diffusion.pipeline_trace import Noises, PreparedCall, perform
from mmspec.modalities.diffusion.step_callback import StepCallback, Watch
from mmspec.modality import Call, Loop
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.targets.continuous.denoising import ChainRequest, ChainTarget
from mmspec.targets.stop import Stop


class ChainRunner:
    """A pipeline, and maybe a draft pipeline, whose latents a recipe decodes.

    Recipes are bound per call: the target holds the call's conditions and its grid.
    """

    own = ("seed", "row_ids", "eta", "churn")

    def __init__(self, pipe: Any, recipe: Recipe, small: Any, max_rows: int | None) -> None:
        self.pipe, self.recipe, self.small, self.max_rows = pipe, recipe, small, max_rows
        for one in (pipe, small):
            if one is not None:
                check_network(one)
        assert isinstance(recipe.execution, Window)
        self.deterministic = recipe.execution.deterministic
        check_scheduler(pipe.scheduler, self.deterministic)
        self.network = Network(pipe)
        self.quick = None if small is None else Network(small)
        self.sees = "nothing" if small is None else recipe.sees

    def run(self, given: Mapping[str, Any], own: Mapping[str, Any], loop: Loop) -> Any:
        """The pipeline's output for its arguments `given`."""
        given = dict(given)
        watch = StepCallback.of(given)
        if own["seed"] is not None and given.get("generator") is not None:
            raise ValueError("seed= and generator= both choose the noise; give one of them")
        given = _seeded(given, own)
        eta = given.get("eta") if own["eta"] is None else own["eta"]
        for name, value in (("eta", eta), ("churn", own["churn"])):
            if value is not None:
                check_number(name, value, 0, example=1.0)
        noises, begun = Noises(eta, own["churn"], self.deterministic), list[int]()

        def sample(opening: PreparedCall) -> Tensor:
            target = ChainTarget(opening.denoiser, self.max_rows)
            small = self._draft_target(opening, given, noises)
            request = _request(opening, own, given)
            begun.append(self.network.rows)
            call = self._call(target, small, request)
            return self._follow(call, request.start, loop, watch.shown(opening))

        output = perform(self.pipe, self.network, given, sample, noises)
        loop.report(replace(loop.stats(), network_rows=self.network.rows - begun[0]))
        return output

    def _call(self, target: ChainTarget, small: ChainTarget | None, request: ChainRequest) -> Call:
        """The recipe bound for this request."""
        recipe = self.recipe
        kit = Kit(target, small, recipe.execution, recipe.sees, None, recipe.options)
        verifier = resolve(recipe.verifier, kit)
        gate = None if recipe.gate is None else resolve(recipe.gate, kit)
        drafter = pair(recipe.architecture(kit), verifier, target)
        parts = Parts(target, drafter, verifier, Stop(target.denoiser.kernel.steps), gate)
        return Call(parts, request, replace(recipe, verifier=verifier, gate=gate))

    def _draft_target(
        self, opening: PreparedCall, given: Mapping[str, Any], noises: Noises
    ) -> ChainTarget | None:
        """The draft pipeline's network under the same arguments, on the target's grid."""
        if self.quick is None:
            return None
        theirs = _prepared(self.small, self.quick, self.pipe.scheduler, given, noises)
        if theirs.start.shape != opening.start.shape:
            raise ValueError(
                f"the draft pipeline's latents are {tuple(theirs.start.shape)} and the target's "
                f"{tuple(opening.start.shape)}; give a draft pipeline of their size"
            )
        return ChainTarget(theirs.denoiser, self.max_rows)

    def _follow(self, call: Call, start: Tensor, loop: Loop, watch: Watch) -> Tensor:
        """The last states (B, *E); shows every step that the slowest picture has taken."""
        ahead: list[list[Tensor]] = [[] for _ in start]  # states not shown yet
        with self.pipe.progress_bar(total=call.parts.stop.max_new_tokens) as bar:
            for kept in loop(call):
                for row, new in zip(ahead, kept.tokens, strict=True):
                    row += new
                while all(ahead):
                    start = torch.stack([row.pop(0) for row in ahead])
                    watch(start)
                    bar.update(1)
        return start


def _request(
    opening: PreparedCall, own: Mapping[str, Any], given: Mapping[str, Any]
) -> ChainRequest:
    """The first states, and the noise of all later ones."""
    start, generator = opening.start, given.get("generator")
    batch, device = start.shape[0], start.device
    seed, row_ids = own["seed"], own["row_ids"]
    if seed is not None:
        generator = None
    if isinstance(generator, list) and row_ids is None:
        row_ids = [_drawn(one) for one in generator]
        seed = 0
    elif generator is not None:
        seed = _drawn(generator[0] if isinstance(generator, list) else generator)
    elif seed is None:
        seed = fresh_seed()
    noise = KeyedNoise.seeded(seed, batch, device, row_ids)
    if generator is None and not _starts_elsewhere(given):
        at = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        start = noise.shared(at).normal(*start.shape[1:])[:, 0] * opening.scale
    return ChainRequest(start, noise)


def _starts_elsewhere(given: Mapping[str, Any]) -> bool:
    """Whether the first state may be more than noise: some argument is a picture, or latents."""
    words = ("image", "video", "latents")
    named = {name: value for name, value in given.items() if any(word in name for word in words)}
    return any(not isinstance(value, int | float | str | None) for value in named.values())


def _seeded(given: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call, where it has a seed with a generator for what the pipeline draws.

    That is used where it begins with a picture of the user's: one generator per row, of its own
    seed. One for all of them where the arguments do not say how many there are: such rows have no
    ids.
    """
    count, seed, ids = pictures(given), own["seed"], own["row_ids"]
    if seed is None:
        return given
    elsewhere = _starts_elsewhere(given)
    if elsewhere and count is None and ids is not None:
        raise ValueError(
            f"row_ids={ids} are one per picture, and the arguments of this pipeline do not say how "
            "many there are before it begins; drop row_ids="
        )
    if count is None or not elsewhere:
        return {**given, "generator": torch.Generator().manual_seed(int(seed) % 2**62)}
    rows = KeyedNoise.seeded(seed, count, torch.device("cpu"), ids).rows
    seeds = [row % 2**62 for row in rows.tolist()]
    return {**given, "generator": [torch.Generator().manual_seed(row) for row in seeds]}


def _drawn(generator: torch.Generator) -> int:
    """A seed out of a generator."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


class _Prepared(Exception):
    """Leaves a draft pipeline once its loop would begin."""

    def __init__(self, opening: PreparedCall) -> None:
        super().__init__()
        self.opening = opening


def _prepared(
    small: Any, network: Network, scheduler: Any, given: Mapping[str, Any], noises: Noises
) -> PreparedCall:
    """What a draft pipeline prepares for the same arguments, on the target's grid."""

    def leave(opening: PreparedCall) -> NoReturn:
        raise _Prepared(opening)

    known = inspect.signature(small.__call__).parameters
    own = {"generator": torch.Generator().manual_seed(0)}  # its noise is not used
    arguments = {name: value for name, value in {**given, **own}.items() if name in known}
    try:
        perform(small, network, arguments, leave, noises, scheduler)
    except _Prepared as prepared:
        return prepared.opening
    raise AssertionError("the loop of the draft pipeline never began")
