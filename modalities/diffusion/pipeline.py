"""`accelerate` for diffusers pipelines: call the result as the pipeline is called.

fast = mmspec.accelerate(pipe, recipe="asd", window=8)
image = fast("a red square", num_inference_steps=100, seed=0).images[0]
fast.last_stats
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from mmspec import recipes
from mmspec.arguments import unknown_message
from mmspec.draft import Verifier
from mmspec.drafters.denoising.window import Window
from mmspec.modalities.diffusion.chains import Chains
from mmspec.modalities.diffusion.loading import load_draft, save
from mmspec.modalities.diffusion.network import Network, pictures
from mmspec.recipe import Kit, Recipe, made
from mmspec.verifiers.naming import named

PARTS = ("recipe", "drafter", "verifier", "window", "tree", "max_rows")


def accelerate_pipeline(
    pipe: Any,
    recipe: str | Recipe | None = None,
    *,
    drafter: Any = None,
    verifier: Verifier | str | None = None,
    window: int | Window | None = None,
    tree: Sequence[int] | None = None,
    max_rows: int | None = None,
    **options: Any,
) -> AcceleratedPipeline:
    """Make a diffusers pipeline generate faster; "asd" unless `recipe` says otherwise.

    `window` is how many states a round moves a picture at most, or a `Window`; `tree` gives widths
    of branching instead. `max_rows` bounds the rows of the network at a time. `drafter` is a small
    pipeline, its folder or "zoo:NAME", where the recipe takes one; a folder may hold a denoising
    network alone. The pipeline is not changed.

    Raises ValueError for parts that do not fit, before anything runs.
    """
    recipe = recipe or "asd"
    plan = recipes.get(recipe) if isinstance(recipe, str) else recipe
    recipes.check_decodes(plan, "latents", pipe)
    unknown = sorted(set(options) - set(plan.options))
    if unknown:
        where = f"accelerate() of a pipeline with recipe {plan.name or 'custom'!r}"
        raise ValueError(unknown_message(unknown, [*PARTS, *plan.options], where))
    plan = replace(
        plan,
        verifier=(named(verifier) if isinstance(verifier, str) else verifier) or plan.verifier,
        execution=_execution(plan, window, tree),
        options={**plan.options, **options},
    )
    given = {"verifier": verifier, "window": window, "tree": tree, "max_rows": max_rows, **options}
    given = {name: value for name, value in given.items() if value is not None}
    return AcceleratedPipeline(pipe, plan, drafter, max_rows, given)


class AcceleratedPipeline:
    """A diffusers pipeline bound to a recipe that decodes latents; called as the pipeline is.

    Beside the pipeline's own arguments a call takes `seed`. Recipes that sample chains also take
    `row_ids` (one per picture: its noise depends on seed and id alone, not on its batch), and `eta`
    or `churn`, which make a deterministic scheduler draw noise, and `on_round`, which is called
    with every `Round` of verified states. The first noise comes from `seed` too, unless `latents`
    or `generator` is given.
    """

    def __init__(
        self,
        pipe: Any,
        recipe: Recipe,
        drafter: Any = None,
        max_rows: int | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self.pipe, self.recipe = pipe, recipe
        self.given = dict(given or {})  # the parts the user replaced, for save_pretrained
        self.signature = inspect.signature(pipe.__call__).parameters
        self.small = _small(pipe, recipe, drafter)
        self.way: Way | None = (
            Chains(pipe, recipe, self.small, max_rows)
            if isinstance(recipe.execution, Window)
            else Forecasts(pipe, recipe)
        )
        self.last_stats: Any = None  # `Stats` of chains, `forecast.hooks.Statistics` of forecasts

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """What the pipeline returns; `last_stats`, and `stats` on the output, say how it went.

        Raises ValueError for arguments that are not known, for those that need steps in their
        order, and where an exact recipe meets a scheduler that draws no noise.
        """
        if self.way is None:
            return self.pipe(*args, **arguments)
        given, own = self._split(args, arguments)
        output, self.last_stats = self.way.run(given, own)
        if not isinstance(output, tuple):  # return_dict=False
            output.stats = self.last_stats
        return output

    def disable(self) -> None:
        """From now on calls are the pipeline's own."""
        self.way = None

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the recipe and its draft pipeline (not the target) for `mmspec.load`."""
        save(self, Path(folder))

    def __enter__(self) -> AcceleratedPipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    def __repr__(self) -> str:
        name = self.recipe.name or "custom recipe"
        return f"AcceleratedPipeline({type(self.pipe).__name__}, {name})"

    def _split(
        self, args: Sequence[Any], arguments: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The pipeline's arguments, by name and with its defaults, and ours."""
        assert self.way is not None
        known = {k: one for k, one in self.signature.items() if one.kind is not one.VAR_KEYWORD}
        extra = [name for name in self.way.own if name not in known]
        unknown = sorted(set(arguments) - {*known, *extra})
        if unknown:
            raise ValueError(
                unknown_message(unknown, [*known, *extra], f"{type(self.pipe).__name__}()")
            )
        if len(args) > len(known):
            raise ValueError(f"{len(args)} arguments by place, but the pipeline takes {len(known)}")
        placed = dict(zip(known, args, strict=False))
        twice = sorted(placed.keys() & arguments.keys())
        if twice:
            raise ValueError(f"{', '.join(twice)} is given by place and by name; give it once")
        theirs = {name: value for name, value in arguments.items() if name in known}
        has_default = {k: one for k, one in known.items() if one.default is not one.empty}
        defaults = {name: one.default for name, one in has_default.items()}
        own = {name: arguments.get(name) for name in self.way.own}
        return {**defaults, **placed, **theirs}, own


class Way(Protocol):
    """How a recipe runs a pipeline; `own` are the arguments it takes beside the pipeline's."""

    @property
    def own(self) -> tuple[str, ...]: ...
    def run(self, given: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Any, Any]: ...


class Forecasts:
    """The pipeline's own loop, with its network taken over for the time of a call."""

    own = ("seed",)

    def __init__(self, pipe: Any, recipe: Recipe) -> None:
        kit = Kit(pipe, None, recipe.execution, recipe.sees, None, recipe.options)
        self.pipe = pipe
        self.forecasting = recipe.architecture(kit).under(made(recipe.verifier, kit))

    def run(self, given: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Any, Any]:
        seed = own["seed"]
        if seed is not None and given.get("generator") is not None:
            raise ValueError("seed= and generator= both choose the noise; give one of them")
        detach = self.forecasting.attach(self.pipe, pictures(given))
        try:
            output = self.pipe(**given) if seed is None else self._seeded(given, seed)
        finally:
            detach()
        return output, detach.statistics

    def _seeded(self, given: Mapping[str, Any], seed: int) -> Any:
        """With the global generator set for the time of the call: not all steps take another."""
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            return self.pipe(**{**given, "generator": torch.Generator().manual_seed(seed)})


def _execution(plan: Recipe, window: int | Window | None, tree: Sequence[int] | None) -> Any:
    """The window that a user asks for; a number keeps the recipe's pace."""
    if window is None and tree is None:
        return plan.execution
    if window is not None and tree is not None:
        raise ValueError("window= and tree= both say how far to draft; give one of them")
    if not isinstance(plan.execution, Window):
        raise ValueError(
            f"recipe {plan.name or 'custom'!r} drafts no window; drop window= and tree="
        )
    if isinstance(tree, str):
        raise ValueError(f"tree={tree!r} are no widths of branching; give some, as in [2, 2, 2]")
    if tree is not None:
        return Window.tree(tree)
    if isinstance(window, Window):
        return replace(window, quiet=plan.execution.quiet)  # the recipe's verifier decides that
    return replace(plan.execution, most=window)


def _small(pipe: Any, recipe: Recipe, drafter: Any) -> Any:
    """The draft pipeline, where the recipe takes one."""
    if drafter is None and recipe.takes_drafter:
        raise ValueError(
            f"recipe {recipe.name!r} needs a draft pipeline; give drafter= a smaller "
            f"{type(pipe).__name__}, its folder or zoo:NAME"
        )
    if drafter is None:
        return None
    if not recipe.takes_drafter:
        raise ValueError(f"recipe {recipe.name!r} takes no draft pipeline; drop drafter=")
    if isinstance(drafter, str | Path):
        drafter = load_draft(pipe, drafter)
    kind = recipe.draft_model[0]
    if not kind.accepts(drafter):
        raise ValueError(f"drafter= is a {type(drafter).__name__}; give a diffusers pipeline")
    return kind.read(drafter, Network(pipe), recipe.sees)
