"""`accelerate` for image models with continuous tokens.

fast = mmspec.accelerate(mar, recipe="cspd-coupled", drafter=small_mar)
out = fast.generate_images(class_labels=[207, 360], guidance=3.0, last_noise=True, seed=0)
out.latents, out.stats
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec import recipes
from mmspec.arguments import fresh_seed, unknown_message
from mmspec.codes.image_family import pictures
from mmspec.decode import Parts, Scorer, decode
from mmspec.draft import Drafter, Verifier
from mmspec.drafters.shapes import shape_of
from mmspec.laws.noise import KeyedNoise
from mmspec.modalities.mar.reader import MarReader, labels, load, numbers
from mmspec.recipe import Kit, Recipe, made, pair
from mmspec.stats import Ledger, Stats
from mmspec.targets.patches import (
    BlindTarget,
    PatchRequest,
    PatchTarget,
    Plan,
    Reader,
    order,
    place,
)
from mmspec.targets.paths import check_random
from mmspec.targets.stop import Stop

PARTS = ("recipe", "drafter", "verifier", "length")
OWN = ("class_labels", "prompt", "seed", "row_ids", "vae")
_RENAMED = {"guidance_schedule": "schedule"}
SETTINGS = tuple(
    next((name for name, own in _RENAMED.items() if own == one.name), one.name)
    for one in fields(Plan)
)


@dataclass(frozen=True)
class LatentImages:
    """What `generate_images` returns; tokens in `stats` are autoregressive steps."""

    latents: Tensor  # (B, channels, h, w), as the model has them
    images: list[Image.Image] | None  # where a VAE was given
    stats: Stats


def accelerate_continuous(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    drafter: Any = None,
    verifier: Verifier | None = None,
    length: int | None = None,
    **options: Any,
) -> AcceleratedContinuous:
    """Make a MAR model draw faster; "cspd-coupled" unless `recipe` says otherwise.

    `drafter` is a smaller MAR model of the same tokens, or its folder or "zoo:NAME"; `length` the
    steps drafted per target call.
    Raises ValueError for parts that do not fit, before anything runs.
    """
    recipe = recipe or "cspd-coupled"
    plan = recipes.get(recipe) if isinstance(recipe, str) else recipe
    recipes.check_decodes(plan, "patches", model)
    unknown = sorted(set(options) - set(plan.options))
    if unknown:
        where = f"accelerate() of a {type(model).__name__} with recipe {plan.name or 'custom'!r}"
        raise ValueError(unknown_message(unknown, [*PARTS, *plan.options], where))
    if drafter is None and plan.takes_drafter:
        raise ValueError(
            f"recipe {plan.name!r} needs a draft model; give drafter= a smaller "
            f"{type(model).__name__}"
        )
    if drafter is not None:
        if not plan.takes_drafter:
            raise ValueError(f"recipe {plan.name!r} takes no draft model; drop drafter=")
        if isinstance(drafter, str | Path):
            drafter = load(drafter)
        target = MarReader.of(model, labels(model, None), Plan())
        drafter = plan.draft_model[0].read(drafter, target, plan.sees)
    plan = replace(
        plan,
        verifier=verifier or plan.verifier,
        execution=shape_of(plan.execution, None, length),
        options={**plan.options, **options},
    )
    return AcceleratedContinuous(model, plan, drafter)


class AcceleratedContinuous:
    """A model with continuous tokens bound to a recipe.

    Recipes are bound per call, which fixes classes and sampler; once here, to refuse early.
    """

    def __init__(self, model: Any, recipe: Recipe, drafter: Any = None) -> None:
        self.model, self.recipe, self.small = model, recipe, drafter
        self.last_stats: Stats | None = None
        self._bound(Plan(), labels(model, None))

    @torch.no_grad()
    def generate_images(self, **arguments: Any) -> LatentImages:
        """Draw one picture per class.

        Takes `class_labels` (a number, or a list in which None is no class) or `prompt` (the name
        of a class in the model's configuration, or several), `seed`, `row_ids`, the settings of
        `mmspec.targets.patches.Plan` (`steps`, `guidance`, `guidance_schedule`, `temperature`,
        `head_steps`, `last_noise`), and `vae`, whose `decode` makes pixels, as that of diffusers.

        Raises ValueError for what is not known, for more steps than cells, and where an exact
        recipe meets a sampler without noise in its last step.
        """
        settings, own = _split(arguments)
        plan, classes = Plan(**settings), self._classes(own["class_labels"], own["prompt"])
        plan.spans(self.model.config.cells)
        bound = self._bound(plan, classes)
        recipe, sees = bound.recipe, str(getattr(bound.drafter, "sees", "nothing"))
        if getattr(recipe.verifier, "random", False):
            check_random(self.model.sampled(plan).kernel)
        seed = fresh_seed() if own["seed"] is None else int(own["seed"])
        noise = KeyedNoise.seeded(seed, len(classes), self.model.device, own["row_ids"])
        ledger = Ledger(recipe.name or "custom", recipe.exact, sees)
        request = PatchRequest(plan, len(classes), noise)
        latents = self.model.picture(self._drawn(bound.parts(plan), request, ledger))
        self.last_stats = ledger.stats()
        images = decoded(own["vae"], latents, self.model.config.latent_scale)
        return LatentImages(latents, images, self.last_stats)

    def _classes(self, given: Any, prompt: str | Sequence[str] | None) -> Tensor:
        if prompt is not None and given is not None:
            raise ValueError("class_labels= and prompt= both say what to draw; give one of them")
        return labels(self.model, given if prompt is None else numbers(self.model, prompt))

    def __repr__(self) -> str:
        name = self.recipe.name or "custom recipe"
        return f"AcceleratedContinuous({type(self.model).__name__}, {name})"

    def _bound(self, plan: Plan, classes: Tensor) -> Bound:
        """The recipe for the classes and the sampler of a call."""
        small = None
        if self.small is not None:
            small = MarReader.of(self.small, classes, plan)
        return bind(self.recipe, MarReader.of(self.model, classes, plan), small)

    def _drawn(self, parts: Parts, request: PatchRequest, ledger: Ledger) -> Tensor:
        """The latents (B, L, C)."""
        tokens: list[list[Tensor]] = [[] for _ in range(request.batch)]
        for kept in ledger.follow(decode(parts, request)):
            for row, new in zip(tokens, kept.tokens, strict=True):
                row.extend(new)
        cells = self.model.config.cells
        turns, spans = order(request.noise, cells), request.plan.spans(cells)
        latents = turns.new_zeros(*turns.shape, self.model.config.token_size, dtype=torch.float32)
        for picture, turn, shown in zip(latents, turns, tokens, strict=True):
            place(picture, turn, spans, shown)
        return latents


@dataclass(frozen=True)
class Bound:
    """A recipe with its parts made for one call."""

    target: Scorer
    recipe: Recipe
    drafter: Drafter

    def parts(self, plan: Plan) -> Parts:
        """What the loop runs."""
        recipe = self.recipe
        return Parts(self.target, self.drafter, recipe.verifier, Stop(plan.steps), recipe.gate)


def bind(recipe: Recipe, reader: Reader, small: Reader | None) -> Bound:
    """A recipe bound to readers. Raises ValueError for settings out of range."""
    target = PatchTarget(reader)
    drafts = None if small is None else PatchTarget(small)
    kit = Kit(target, drafts, recipe.execution, recipe.sees, None, recipe.options)
    recipe = replace(recipe, verifier=made(recipe.verifier, kit))
    drafter = pair(recipe.architecture(kit), recipe.verifier, target)
    blind = getattr(recipe.verifier, "blind", False)
    return Bound(BlindTarget(reader) if blind else target, recipe, drafter)


def _split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the plan, and our own arguments."""
    unknown = sorted(set(arguments) - {*OWN, *SETTINGS})
    if unknown:
        raise ValueError(unknown_message(unknown, [*OWN, *SETTINGS], "generate_images()"))
    return settings_of(arguments), {name: arguments.get(name) for name in OWN}


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a `Plan` is made of, among the arguments of a call."""
    given = {name: arguments[name] for name in SETTINGS if arguments.get(name) is not None}
    return {_RENAMED.get(name, name): value for name, value in given.items()}


def decoded(vae: Any, latents: Tensor, scale: float) -> list[Image.Image] | None:
    """Pixels of latents that were scaled for the model; None without a VAE."""
    if vae is None:
        return None
    output = vae.decode(latents / scale)
    return pictures(output if isinstance(output, Tensor) else output[0])
