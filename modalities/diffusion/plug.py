"""Sessions of diffusers pipelines, which are called like the pipeline."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from mmspec import zoo
from mmspec.draft_models import BoundDraftModel, draft_model
from mmspec.drafters.denoising.window import Window
from mmspec.errors import check_number, format_value, unknown_message
from mmspec.modalities.diffusion.accelerated import AcceleratedPipeline
from mmspec.modalities.diffusion.few_steps import count_steps, describe_few_steps
from mmspec.modalities.diffusion.forecast_runner import ForecastRunner
from mmspec.modalities.diffusion.network import Network
from mmspec.modalities.diffusion.runners import ChainRunner
from mmspec.modalities.diffusion.stochastic_sampler import StochasticSampler, make_stochastic
from mmspec.modality import Loop, Session
from mmspec.models.loading import load_pipeline
from mmspec.models.placement import ANYWHERE, Placement
from mmspec.models.quantized_pipelines import quantize_in_place
from mmspec.recipe import Recipe
from mmspec.targets.continuous.split_rows import SplitRows

log = logging.getLogger("mmspec")
COUNTS = ("num_inference_steps", "batch_size", "num_images_per_prompt", "num_videos_per_prompt")


class PipelineRunner(Protocol):
    """Runs a pipeline with a recipe; `own` are the arguments in addition to the pipeline's."""

    @property
    def own(self) -> tuple[str, ...]: ...
    @property
    def sees(self) -> str: ...

    @property
    def measured(self) -> Mapping[str, Any]: ...  # parts of the recipe, by an earlier call

    warned: bool  # of calls that the recipe cannot speed up

    def count_fewest(self, steps: int) -> int: ...  # network calls at best
    def run(self, given: Mapping[str, Any], own: Mapping[str, Any], loop: Loop) -> Any: ...


class PipelineSession(Session):
    """A pipeline bound to a recipe that decodes latents.

    A call takes the pipeline's arguments and `seed`. Recipes that sample chains also take `row_ids`
    (one per image: its noise depends on seed and id only, not on its batch), and `eta` or `churn`,
    which make a deterministic scheduler draw noise. The initial noise comes from `seed` too, unless
    `latents` or `generator` is given. Recipes that forecast network outputs keep the pipeline's
    loop; every step of it is shown as a round.
    """

    interface = AcceleratedPipeline

    def __init__(
        self,
        pipe: Any,
        recipe: Recipe,
        small: BoundDraftModel | None,
        max_rows: int | SplitRows | None,
        sampler: StochasticSampler | None = None,
    ) -> None:
        self.model, self.recipe, self.draft_model = pipe, recipe, small
        self.parameters = inspect.signature(pipe.__call__).parameters
        eta = None
        if sampler is not None:
            pipe, eta = copy.copy(pipe), sampler.eta
            pipe.scheduler = sampler.scheduler
        self.runner: PipelineRunner = (
            ChainRunner(pipe, recipe, None if small is None else small.model, max_rows, eta)
            if isinstance(recipe.execution, Window)
            else ForecastRunner(pipe, recipe)
        )

    @property
    def sees(self) -> str:
        return self.runner.sees

    @property
    def name(self) -> str | None:
        return str(self.model.name_or_path or "") or None  # diffusers keeps a Path as a Path

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        """The pipeline's output, with `stats` attached.

        Raises ValueError for unknown arguments, for arguments that need sequential steps, and for
        an exact recipe with a deterministic scheduler.
        """
        given, own = self._split(args, arguments)
        _check_call(given)
        _check_window(self.recipe, given)
        self._warn_of_few_steps(given)
        output = self.runner.run(given, own, loop)
        if not isinstance(output, tuple):  # return_dict=False
            output.stats = loop.stats()
        return output

    def _warn_of_few_steps(self, given: Mapping[str, Any]) -> None:
        """Warn once, before the pipeline runs, where the recipe can save little."""
        steps, name = count_steps(given), self.recipe.name or "custom"
        if steps is None or self.runner.warned:
            return
        message = describe_few_steps(self.model, name, steps, self.runner.count_fewest(steps))
        if message is not None:
            self.runner.warned = True
            log.warning(message)

    def save(self, folder: Path) -> None:
        """Save the draft pipeline, if there is one."""
        if self.draft_model is not None:
            self.draft_model.save(folder, Network(self.model), None)

    def _split(
        self, args: Sequence[Any], arguments: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split arguments into the pipeline's, with its defaults, and the runner's."""
        known = {k: one for k, one in self.parameters.items() if one.kind is not one.VAR_KEYWORD}
        extra = [name for name in self.runner.own if name not in known]
        unknown = sorted(set(arguments) - {*known, *extra})
        if unknown:
            where = f"{type(self.model).__name__}()"
            raise ValueError(unknown_message(unknown, [*known, *extra, "on_round"], where))
        if len(args) > len(known):
            raise ValueError(
                f"{len(args)} positional arguments, but the pipeline takes {len(known)}"
            )
        placed = dict(zip(known, args, strict=False))
        twice = sorted(placed.keys() & arguments.keys())
        if twice:
            raise ValueError(f"{', '.join(twice)} is given by position and by name; give it once")
        theirs = {name: value for name, value in arguments.items() if name in known}
        has_default = {k: one for k, one in known.items() if one.default is not one.empty}
        defaults = {name: one.default for name, one in has_default.items()}
        own = {name: arguments.get(name) for name in self.runner.own}
        return {**defaults, **placed, **theirs}, own


def _check_call(given: Mapping[str, Any]) -> None:
    """Check counts, generators and latents. Raises ValueError for invalid values."""
    for name in COUNTS:
        if given.get(name) is not None:
            check_number(name, given[name], 1, whole=True)
    if given.get("max_sequence_length") is not None:  # a tokenizer pads to it
        check_number("max_sequence_length", given["max_sequence_length"], 1, 65536, whole=True)
    generator, latents = given.get("generator"), given.get("latents")
    made = generator if isinstance(generator, list) else [generator]
    if generator is not None and not all(isinstance(one, torch.Generator) for one in made):
        raise ValueError(
            f"generator={format_value(generator)} must be a torch.Generator or a list of them; or "
            "give seed= a number"
        )
    if latents is None:
        return
    if not isinstance(latents, torch.Tensor) or not bool(torch.isfinite(latents).all()):
        raise ValueError(
            f"latents={format_value(latents)} must be a tensor of finite numbers; or drop it"
        )


def _check_window(recipe: Recipe, given: Mapping[str, Any]) -> None:
    """Raises ValueError for a window longer than the steps that are asked for.

    A chain that starts from an image is shorter; it is checked once the pipeline has prepared it.
    """
    steps = count_steps({**given, "image": None})
    if steps is not None and isinstance(recipe.execution, Window):
        recipe.execution.check(steps)


def session(pipe: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> PipelineSession:
    """A pipeline bound to a recipe.

    `window` is the maximal number of states per round, or a `Window`; `tree` gives branching widths
    instead. `max_rows` limits the rows per network call, or splits them over processes
    (`SplitRows`). `sampler="stochastic"` takes the counterpart with noise of a deterministic
    scheduler; the pipeline itself keeps its scheduler. `drafter` is a draft pipeline, its folder or
    "zoo:NAME", if the recipe takes one; a folder may hold a denoising network alone. Raises
    ValueError for parts that do not fit.
    """
    rows = _check_rows(recipe, parts.get("max_rows"))
    recipe = replace(recipe, execution=_execution(recipe, parts.get("window"), parts.get("tree")))
    _warn_of_few_rows(recipe, rows.total if isinstance(rows, SplitRows) else rows)
    small = draft_model(recipe, drafter, Network(pipe))
    sampler = _find_sampler(pipe, recipe, parts.get("sampler"))
    return PipelineSession(pipe, recipe, small, rows, sampler)


def _check_rows(recipe: Recipe, rows: int | SplitRows | None) -> int | SplitRows | None:
    """`max_rows`. Raises ValueError for another value, and for recipes that keep the loop."""
    if rows is None:
        return None
    if not isinstance(rows, SplitRows):
        check_number("max_rows", rows, 1, whole=True, example=8)
    if not isinstance(recipe.execution, Window):
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} calls the network with the rows of the pipeline; "
            "drop max_rows="
        )
    return rows


def _warn_of_few_rows(recipe: Recipe, max_rows: int | None) -> None:
    """Warn where no window of states fits into one call of the network."""
    window = recipe.execution
    states = window.max_states if isinstance(window, Window) else None
    if max_rows is not None and states is not None and max_rows < states:
        log.warning(
            "max_rows=%d is less than the window of %d states, so a window takes several "
            "forwards of the network and can cost more than plain sampling; raise max_rows, or "
            "give window=%d",
            *(max_rows, states, max_rows),
        )


def _find_sampler(pipe: Any, recipe: Recipe, sampler: Any) -> StochasticSampler | None:
    """The counterpart with noise of the pipeline's sampler, if it is wanted.

    Raises ValueError for another name, and for recipes and schedulers without such a sampler.
    """
    if sampler is None:
        return None
    if sampler != "stochastic":
        raise ValueError(
            f'sampler={sampler!r} must be "stochastic"; leave it out to keep the pipeline\'s own'
        )
    if not isinstance(recipe.execution, Window):
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} keeps the pipeline's own loop and scheduler; drop "
            "sampler=, or choose a recipe that samples chains, such as 'asd'"
        )
    found = make_stochastic(pipe.scheduler)
    log.warning(found.change)
    return found


def _execution(recipe: Recipe, window: Any, tree: Any) -> Any:
    """The requested window; a number sets the maximal length of the recipe's window."""
    if window is None and tree is None:
        return recipe.execution
    if window is not None and tree is not None:
        raise ValueError("window= and tree= both set the draft length; give one of them")
    if not isinstance(recipe.execution, Window):
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} drafts no window; drop window= and tree="
        )
    if tree is not None and not (isinstance(tree, list | tuple) and tree):
        raise ValueError(f"tree={tree!r} must be a list of branching widths, as in [2, 2, 2]")
    if tree is not None:
        return Window.tree(tree)
    if isinstance(window, Window):
        # the recipe's verifier decides whether noiseless steps may be drafted
        return replace(window, deterministic=recipe.execution.deterministic)
    return replace(recipe.execution, max_states=window)


def load(
    source: str | Path, trust_remote_code: bool = False, placement: Placement = ANYWHERE
) -> Any:
    """A pipeline from a folder, a hub name, or "zoo:NAME"; safetensors only.

    Raises ValueError for a missing folder, and for a bundled draft model.
    """
    name = str(source)
    if not name.startswith("zoo:"):
        return load_pipeline(name, placement.torch_dtype, trust_remote_code, placement)
    if placement.device_map is not None:
        raise ValueError(
            f"device_map={placement.device_map!r}: {name} is a bundled pipeline, which fits on any "
            "device; give device="
        )
    entry = zoo.info(name.removeprefix("zoo:"))
    if entry.target is not None:
        raise ValueError(
            f"{name} is a draft model of zoo:{entry.target}, which generates nothing without it; "
            f"give zoo:{entry.target}, and {name} as the drafter"
        )
    pipe = zoo.load(entry.name, placement.torch_dtype)
    if placement.quantize is not None:
        with placement.explain(name):
            quantize_in_place(pipe, placement)
    return placement.finish(pipe)
