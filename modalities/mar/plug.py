"""Models that draw with continuous tokens (MAR): `generate_images`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec.codes.image_family import partial_pictures, pictures
from mmspec.declared import answered_by
from mmspec.decode import Parts
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.draft import Drafter, Gate, Target, Verifier
from mmspec.draft_models import BoundDraftModel, draft_model
from mmspec.drafters.shapes import shape_of
from mmspec.errors import described, unknown_message
from mmspec.modalities.mar import reader
from mmspec.modalities.mar.reader import MarReader, labels, numbers
from mmspec.modality import Call, Loop, Session
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.stats import Stats
from mmspec.targets.continuous.patches import (
    BlindTarget,
    PatchReader,
    PatchRequest,
    PatchSettings,
    PatchTarget,
    order,
    place,
)
from mmspec.targets.continuous.paths import check_random
from mmspec.targets.stop import Stop

OWN = ("class_labels", "prompt", "seed", "row_ids", "vae")
_RENAMED = {"guidance_schedule": "schedule"}
SETTINGS = tuple(
    next((name for name, own in _RENAMED.items() if own == one.name), one.name)
    for one in fields(PatchSettings)
)


@dataclass(frozen=True)
class LatentImages:
    """What `generate_images` returns; tokens in `stats` are autoregressive steps."""

    latents: Tensor  # (B, channels, h, w), as the model has them
    images: list[Image.Image] | None  # where a VAE was given
    stats: Stats


class PatchSession(Session):
    """A model of continuous tokens bound to a recipe.

    Recipes are bound per call, which fixes classes and sampler; once here, to refuse early.
    """

    calls = ("generate_images",)

    def __init__(self, model: Any, recipe: Recipe, small: BoundDraftModel | None = None) -> None:
        self.model, self.recipe, self.draft_model = model, recipe, small
        self.drafter = self._bound(PatchSettings(), labels(model, None)).drafter

    sees = answered_by("drafter.sees")

    def run(
        self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> LatentImages:
        """Draw one picture per class.

        Takes `class_labels` (a number, or a list in which None is no class) or `prompt` (the name
        of a class in the model's configuration, or several), `seed`, `row_ids`, the settings of
        `mmspec.targets.continuous.patches.Plan` (`steps`, `guidance`, `guidance_schedule`,
        `temperature`,
        `head_steps`, `last_noise`), and `vae`, whose `decode` makes pixels, as that of diffusers.

        Raises ValueError for what is not known, for more steps than cells, and where an exact
        recipe meets a sampler without noise in its last step.
        """
        if args:
            raise ValueError("generate_images() takes its arguments by name; give class_labels=")
        settings, own = _split(arguments)
        plan, classes = PatchSettings(**settings), self._classes(own["class_labels"], own["prompt"])
        plan.spans(self.model.config.cells)
        bound = self._bound(plan, classes)
        if bound.verifier.random:
            check_random(self.model.sampled(plan).kernel)
        seed = fresh_seed() if own["seed"] is None else own["seed"]
        noise = KeyedNoise.seeded(seed, len(classes), self.model.device, own["row_ids"])
        request = PatchRequest(plan, len(classes), noise)
        made = replace(bound.call(request), view=partial(self._partial, request, own["vae"]))
        latents = self.model.picture(self._drawn(made, request, loop))
        images = decoded(own["vae"], latents, self.model.config.latent_scale)
        return LatentImages(latents, images, loop.stats())

    def save(self, folder: Path) -> None:
        if self.draft_model is not None:
            self.draft_model.save(folder, self.model, self.drafter)

    def _classes(self, given: Any, prompt: str | Sequence[str] | None) -> Tensor:
        if prompt is not None and given is not None:
            raise ValueError("class_labels= and prompt= both say what to draw; give one of them")
        return labels(self.model, given if prompt is None else numbers(self.model, prompt))

    def _bound(self, plan: PatchSettings, classes: Tensor) -> BoundPatches:
        """The recipe for the classes and the sampler of a call."""
        small = None
        if self.draft_model is not None:
            small = MarReader.of(self.draft_model.model, classes, plan)
        return bind(self.recipe, MarReader.of(self.model, classes, plan), small)

    def _drawn(self, call: Call, request: PatchRequest, loop: Loop) -> Tensor:
        """The latents (B, L, C)."""
        tokens: list[list[Tensor]] = [[] for _ in range(request.batch)]
        for kept in loop(call):
            for row, new in zip(tokens, kept.tokens, strict=True):
                row.extend(new)
        return self._placed(tokens, request)

    def _placed(self, tokens: Sequence[Sequence[Tensor]], request: PatchRequest) -> Tensor:
        """The latents (B, L, C), zeros where nothing is drawn yet."""
        cells = self.model.config.cells
        turns, spans = order(request.noise, cells), request.plan.spans(cells)
        latents = turns.new_zeros(*turns.shape, self.model.config.token_size).float()
        for picture, turn, shown in zip(latents, turns, tokens, strict=True):
            place(picture, turn, spans, shown)
        return latents

    def _partial(
        self, request: PatchRequest, vae: Any, tokens: Sequence[Sequence[Tensor]]
    ) -> list[Image.Image]:
        """The pictures of so many steps. Raises ValueError without a VAE."""
        if vae is None:
            raise ValueError("there are latents only; give vae= to see the picture so far")
        config = self.model.config
        latents = self.model.picture(self._placed(tokens, request))
        pixels = pixels_of(vae, latents / config.latent_scale)
        ends = [0, *(end for _, end in request.plan.spans(config.cells))]
        shown = torch.tensor([ends[len(row)] for row in tokens], device=latents.device)
        known = order(request.noise, config.cells).argsort(-1) < shown[:, None]
        return partial_pictures(pixels, known.unflatten(1, (config.side, config.side)))


@dataclass(frozen=True)
class BoundPatches:
    """A recipe with its parts made for one call."""

    target: Target
    recipe: Recipe
    drafter: Drafter
    verifier: Verifier
    gate: Gate | None

    def call(self, request: PatchRequest) -> Call:
        """One request in terms of the loop."""
        return Call(self.parts(request.plan), request, self.recipe)

    def parts(self, plan: PatchSettings) -> Parts:
        """What the loop runs."""
        return Parts(self.target, self.drafter, self.verifier, Stop(plan.steps), self.gate)


def bind(recipe: Recipe, reader: PatchReader, small: PatchReader | None) -> BoundPatches:
    """A recipe bound to readers. Raises ValueError for settings out of range."""
    target = PatchTarget(reader)
    drafts = None if small is None else PatchTarget(small)
    kit = Kit(target, drafts, recipe.execution, recipe.sees, None, recipe.options)
    verifier = resolve(recipe.verifier, kit)
    gate = None if recipe.gate is None else resolve(recipe.gate, kit)
    drafter = pair(recipe.architecture(kit), verifier, target)
    scorer = BlindTarget(reader) if verifier.blind else target
    return BoundPatches(
        scorer, replace(recipe, verifier=verifier, gate=gate), drafter, verifier, gate
    )


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> PatchSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    target = MarReader.of(model, labels(model, None), PatchSettings())
    small = draft_model(recipe, drafter, target)
    shape = shape_of(recipe.execution, None, parts.get("length"))
    return PatchSession(model, replace(recipe, execution=shape), small)


def _split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the plan, and our own arguments."""
    unknown = sorted(set(arguments) - {*OWN, *SETTINGS})
    if unknown:
        raise ValueError(unknown_message(unknown, [*OWN, *SETTINGS], "generate_images()"))
    return settings_of(arguments), {name: arguments.get(name) for name in OWN}


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a `PatchSettings` is made of, among the arguments of a call."""
    given = {name: arguments[name] for name in SETTINGS if arguments.get(name) is not None}
    return {_RENAMED.get(name, name): value for name, value in given.items()}


def decoded(vae: Any, latents: Tensor, scale: float) -> list[Image.Image] | None:
    """Pictures of latents that were scaled for the model; None without a VAE."""
    return None if vae is None else pictures(pixels_of(vae, latents / scale))


def pixels_of(vae: Any, latents: Tensor) -> Tensor:  # (B, 3, h, w) in [-1, 1]
    """What a VAE makes of latents. Raises ValueError for what is none."""
    try:
        decode = vae.decode
    except AttributeError:
        raise ValueError(
            f"vae={described(vae)} cannot decode; give an autoencoder of diffusers"
        ) from None
    output = decode(latents)
    pixels: Tensor = output if isinstance(output, Tensor) else output[0]
    return pixels


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder or "zoo:NAME"; no code of a folder is ever run."""
    return reader.load(source)
