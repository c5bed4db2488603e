"""Sessions of continuous-token image models (MAR): `generate_images`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec._attributes import delegate_to
from mmspec.codes.image_family import render_partial, to_images
from mmspec.decode import Parts
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.draft import Drafter, Gate, Target, Verifier
from mmspec.draft_models import BoundDraftModel, draft_model
from mmspec.drafters.shapes import shape_of
from mmspec.errors import format_value, unknown_message
from mmspec.modalities.mar import reader
from mmspec.modalities.mar.accelerated import AcceleratedMarModel, LatentImages
from mmspec.modalities.mar.reader import MarReader, class_numbers, class_tensor
from mmspec.modality import Call, Loop, Session
from mmspec.models.placement import ANYWHERE
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.targets.continuous.patches import (
    BlindTarget,
    PatchReader,
    PatchRequest,
    PatchSettings,
    PatchTarget,
    draw_order,
    place,
)
from mmspec.targets.continuous.paths import check_random
from mmspec.targets.stop import Stop

OWN = ("class_labels", "prompt", "seed", "row_ids", "vae", "on_round")
_FIELD_NAMES = {"guidance_schedule": "schedule"}
SETTINGS = tuple(
    next((name for name, own in _FIELD_NAMES.items() if own == one.name), one.name)
    for one in fields(PatchSettings)
)


class PatchSession(Session):
    """A MAR model bound to a recipe.

    The recipe is bound again in each call, which sets classes and sampler. Binding it here once
    raises errors early.
    """

    interface = AcceleratedMarModel

    def __init__(self, model: Any, recipe: Recipe, small: BoundDraftModel | None = None) -> None:
        self.model, self.recipe, self.draft_model = model, recipe, small
        self.drafter = self._bind_call(PatchSettings(), class_tensor(model, None)).drafter

    sees = delegate_to("drafter.sees")

    def run(
        self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> LatentImages:
        """Generate one image per class.

        Takes `class_labels` (a number, or a list in which None is no class) or `prompt` (the name
        of a class in the model's configuration, or several), `seed`, `row_ids`, the settings of
        `mmspec.targets.continuous.patches.PatchSettings` (`steps`, `guidance`,
        `guidance_schedule`, `temperature`, `head_steps`, `last_noise`), and `vae`, an autoencoder
        with the `decode` of diffusers.

        Raises ValueError for unknown arguments, for more steps than cells, and for an exact recipe
        with a sampler that has no noise in its last step.
        """
        if args:
            raise ValueError("generate_images() takes its arguments by name; give class_labels=")
        settings, own = _split_arguments(arguments)
        plan, classes = PatchSettings(**settings), self._classes(own["class_labels"], own["prompt"])
        plan.spans(self.model.config.cells)
        bound = self._bind_call(plan, classes)
        if bound.verifier.needs_random_steps:
            check_random(self.model.make_sampler(plan).kernel)
        seed = fresh_seed() if own["seed"] is None else own["seed"]
        noise = KeyedNoise.from_seed(seed, len(classes), self.model.device, own["row_ids"])
        request = PatchRequest(plan, len(classes), noise)
        made = replace(bound.call(request), view=partial(self._decode_partial, request, own["vae"]))
        latents = self.model.to_vae_latents(self._generate_latents(made, request, loop))
        images = decode_latents(own["vae"], latents, self.model.config.latent_scale)
        return LatentImages(latents, images, loop.stats())

    def save(self, folder: Path) -> None:
        if self.draft_model is not None:
            self.draft_model.save(folder, self.model, self.drafter)

    def _classes(self, given: Any, prompt: str | Sequence[str] | None) -> Tensor:
        if prompt is not None and given is not None:
            raise ValueError("class_labels= and prompt= both give classes; give one of them")
        return class_tensor(
            self.model, given if prompt is None else class_numbers(self.model, prompt)
        )

    def _bind_call(self, plan: PatchSettings, classes: Tensor) -> BoundPatches:
        """Bind the recipe to the classes and the sampler of a call."""
        small = None
        if self.draft_model is not None:
            small = MarReader.of(self.draft_model.model, classes, plan)
        return bind(self.recipe, MarReader.of(self.model, classes, plan), small)

    def _generate_latents(self, call: Call, request: PatchRequest, loop: Loop) -> Tensor:
        """The latents (B, L, C)."""
        tokens: list[list[Tensor]] = [[] for _ in range(request.batch)]
        for round_ in loop(call):
            for row, new in zip(tokens, round_.tokens, strict=True):
                row.extend(new)
        return self._place_tokens(tokens, request)

    def _place_tokens(self, tokens: Sequence[Sequence[Tensor]], request: PatchRequest) -> Tensor:
        """The latents (B, L, C) with zeros in open cells."""
        cells = self.model.config.cells
        turns, spans = draw_order(request.noise, cells), request.plan.spans(cells)
        latents = turns.new_zeros(*turns.shape, self.model.config.token_size).float()
        for picture, turn, shown in zip(latents, turns, tokens, strict=True):
            place(picture, turn, spans, shown)
        return latents

    def _decode_partial(
        self, request: PatchRequest, vae: Any, tokens: Sequence[Sequence[Tensor]]
    ) -> list[Image.Image]:
        """Partial images of the tokens so far. Raises ValueError without a VAE."""
        if vae is None:
            raise ValueError("partial images need an autoencoder; give vae=")
        config = self.model.config
        latents = self.model.to_vae_latents(self._place_tokens(tokens, request))
        pixels = decode_pixels(vae, latents / config.latent_scale)
        ends = [0, *(end for _, end in request.plan.spans(config.cells))]
        shown = torch.tensor([ends[len(row)] for row in tokens], device=latents.device)
        known = draw_order(request.noise, config.cells).argsort(-1) < shown[:, None]
        return render_partial(pixels, known.unflatten(1, (config.side, config.side)))


@dataclass(frozen=True)
class BoundPatches:
    """A recipe with its parts built for one call."""

    target: Target
    recipe: Recipe
    drafter: Drafter
    verifier: Verifier
    gate: Gate | None

    def call(self, request: PatchRequest) -> Call:
        """The call of the decoding loop for a request."""
        return Call(self.parts(request.plan), request, self.recipe)

    def parts(self, plan: PatchSettings) -> Parts:
        """The parts of the decoding loop."""
        return Parts(self.target, self.drafter, self.verifier, Stop(plan.steps), self.gate)


def bind(recipe: Recipe, reader: PatchReader, small: PatchReader | None) -> BoundPatches:
    """A recipe bound to readers. Raises ValueError for settings out of range."""
    target = PatchTarget(reader)
    drafts = None if small is None else PatchTarget(small)
    kit = Kit(target, drafts, recipe.execution, recipe.sees, None, recipe.options)
    verifier = resolve(recipe.verifier, kit)
    gate = None if recipe.gate is None else resolve(recipe.gate, kit)
    drafter = pair(recipe.architecture(kit), verifier, target)
    scorer = BlindTarget(reader) if verifier.is_blind else target
    return BoundPatches(
        scorer, replace(recipe, verifier=verifier, gate=gate), drafter, verifier, gate
    )


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> PatchSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    target = MarReader.of(model, class_tensor(model, None), PatchSettings())
    small = draft_model(recipe, drafter, target)
    shape = shape_of(recipe.execution, None, parts.get("length"))
    return PatchSession(model, replace(recipe, execution=shape), small)


def _split_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments into settings of the plan and all others."""
    unknown = sorted(set(arguments) - {*OWN, *SETTINGS})
    if unknown:
        raise ValueError(unknown_message(unknown, [*OWN, *SETTINGS], "generate_images()"))
    return parse_plan_settings(arguments), {name: arguments.get(name) for name in OWN}


def parse_plan_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `PatchSettings` among the arguments of a call."""
    given = {name: arguments[name] for name in SETTINGS if arguments.get(name) is not None}
    return {_FIELD_NAMES.get(name, name): value for name, value in given.items()}


def decode_latents(vae: Any, latents: Tensor, scale: float) -> list[Image.Image] | None:
    """Images of latents that were scaled for the model; None without a VAE."""
    return None if vae is None else to_images(decode_pixels(vae, latents / scale))


def decode_pixels(vae: Any, latents: Tensor) -> Tensor:  # (B, 3, h, w) in [-1, 1]
    """Decode latents. Raises ValueError for a `vae` without `decode`."""
    try:
        decode = vae.decode
    except AttributeError:
        raise ValueError(
            f"vae={format_value(vae)} cannot decode; give an autoencoder of diffusers"
        ) from None
    output = decode(latents.to(getattr(vae, "device", latents.device)))
    pixels: Tensor = output if isinstance(output, Tensor) else output[0]
    return pixels


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder or "zoo:NAME", without running code of the folder."""
    return reader.load(source, options.get("placement", ANYWHERE))
