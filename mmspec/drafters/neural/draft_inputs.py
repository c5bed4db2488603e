"""The inputs of a draft model for each value of `sees`: which image information it gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmspec import _hf
from mmspec._attributes import default_property
from mmspec.compressors import parse_compressor
from mmspec.compressors.contract import (
    KEPT,
    OF_ROBOTS,
    Compressed,
    Compressor,
    Features,
    check_needs,
    compress_images,
    keep_all,
    split_features,
)
from mmspec.drafters.neural.embed_prompt import merge_visual_features, remove_padding
from mmspec.drafters.neural.signals import FeaturePrompt, collect_signals, required_signals
from mmspec.recipe import COMPRESSIBLE, Kit
from mmspec.targets.readers.attention_tap import ClassTokenTap
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Reader
from mmspec.targets.readers.visual import FeatureLayout, encode_media
from mmspec.targets.tokens.context import Context


class DraftInputs(ABC):
    """Builds the inputs of a draft model's prefill from a request."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The value of `sees`, reported in `Stats`."""

    @default_property
    def required_features(self) -> frozenset[str]:
        """Features that the target must provide, as for a `Drafter`."""
        return frozenset()

    @abstractmethod
    def build(self, context: Context, backbone: Reader) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class TextInputs(DraftInputs):
    """Text only: placeholder and frame tokens are removed from the prompt (SPD-MLLM, 2024)."""

    hidden: tuple[int, ...] = ()  # ids to remove
    name: str = "nothing"

    def build(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        hidden = set(self.hidden)
        rows = [[token for token in row if token not in hidden] for row in prompt_tokens(context)]
        return pad_rows(rows, context.device)


CAPTIONS = "captions"  # key of `drafter_inputs`: token ids per row


@dataclass(frozen=True)
class CaptionInputs(DraftInputs):
    """Text only: a caption, given with the call, in place of the first image (TABED, 2026).

    Raises ValueError for a caption of a row without an image.
    """

    hidden: tuple[int, ...] = ()  # ids of images
    name: str = "caption"

    def build(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        hidden, rows = set(self.hidden), list[list[int]]()
        captions = context.request.drafter_inputs[CAPTIONS]
        for row, (tokens, caption) in enumerate(zip(prompt_tokens(context), captions, strict=True)):
            first = next((at for at, one in enumerate(tokens) if one in hidden), len(tokens))
            if caption and first == len(tokens):
                raise ValueError(
                    f"prompt {row} has a caption, but no image that it would stand for; give None"
                )
            rest = [token for token in tokens[first:] if token not in hidden]
            rows.append([*tokens[:first], *caption, *rest])
        return pad_rows(rows, context.device)


@dataclass(frozen=True)
class PlaceholderInputs(DraftInputs):
    """The unchanged prompt, placeholders read as ordinary tokens; no image."""

    name: str = "placeholders"

    def build(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        return pad_rows(prompt_tokens(context), context.device)


@dataclass(frozen=True)
class PixelInputs(DraftInputs):
    """The whole request, through the draft model's own encoder."""

    name: str = "pixels"

    def build(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        given, dtype = draft_request(context), backbone.model.dtype
        media = {name: given.get(name) for name in backbone.family.media}
        prompt = {name: one for name, one in media.items() if isinstance(one, Tensor)}
        return {
            **given,
            **{k: v.to(dtype) if v.is_floating_point() else v for k, v in prompt.items()},
        }


@dataclass(frozen=True)
class CompressedPixelInputs(DraftInputs):
    """The request through the draft model's encoder and a compressor, at the original slots."""

    layout: FeatureLayout  # the draft model's
    compressor: Compressor
    name: str = "pixels"

    @property
    def required_features(self) -> frozenset[str]:
        return required_signals(self.compressor.needs)

    def build(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        given = draft_request(context)
        token = None
        if "cls" in self.compressor.needs:
            token = ClassTokenTap(backbone.model, backbone.family)
        with token or nullcontext():
            outputs = encode_media(backbone, given)["mm_encoder_outputs"]
        prompt = _feature_prompt(given, backbone, () if token is None else token.attention)
        visual = _compress_media(self.layout, outputs, given, self.compressor, context, prompt)
        marks = tuple(self.layout.placeholders.values())
        return merge_visual_features(backbone, given, visual, marks, self.compressor.weighted)


@dataclass(frozen=True)
class TargetFeatureInputs(DraftInputs):
    """The target's own vision features, encoded once, at the original slots.

    They go through the compressor, then through the projector; both may be None. Features that a
    target adds inside its decoder (deepstack) are not included.
    """

    layout: FeatureLayout  # the target's
    target: Reader
    compressor: Compressor | None = None
    projector: nn.Module | None = None
    name: str = "target-features"

    @property
    def required_features(self) -> frozenset[str]:
        needs = frozenset() if self.compressor is None else self.compressor.needs
        return frozenset({"vision"}) | required_signals(needs) | (needs & {"cls"})

    def compressed_images(self, context: Context) -> list[list[Compressed]]:
        """The images of every row, compressed."""
        given = context.request.inputs
        prompt = _feature_prompt(given, self.target, context.shared["cls"] or ())
        outputs = context.shared["vision"]
        return _compress_media(self.layout, outputs, given, self.compressor, context, prompt)

    def build_uncompressed(self, given: Mapping[str, Any], backbone: Reader) -> Mapping[str, Any]:
        """The same inputs outside a request, for training; the target encodes the images."""
        with torch.no_grad():
            outputs = _hf.encode_media(self.target.model, given).get("mm_encoder_outputs", {})
        found = _collect_images(self.layout, outputs, given, remove_padding(given)[0])
        visual = [[keep_all(image) for image in row] for row in found]
        return self._merge(given, visual, backbone)

    def build(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        return self._merge(context.request.inputs, self.compressed_images(context), backbone)

    def _merge(
        self, given: Mapping[str, Any], visual: list[list[Compressed]], backbone: Reader
    ) -> Mapping[str, Any]:
        if self.projector is not None:
            visual = [[_project(image, self.projector) for image in row] for row in visual]
        is_weighted = self.compressor is not None and self.compressor.weighted
        marks = tuple(self.layout.placeholders.values())
        return merge_visual_features(backbone, given, visual, marks, is_weighted)


def _feature_prompt(
    inputs: Mapping[str, Any], reader: Reader, cls: Sequence[Tensor]
) -> FeaturePrompt:
    """The prompt of `inputs`, for features computed by `reader`."""
    rows, _ = remove_padding(inputs)
    placeholder = reader.placeholder_ids[0]
    return FeaturePrompt(rows, frozenset(reader.visual_ids), reader.embed, cls, placeholder)


def _compress_media(
    layout: FeatureLayout,
    outputs: Mapping[str, Any],
    inputs: Mapping[str, Any],
    compressor: Compressor | None,
    context: Context,
    prompt: FeaturePrompt,
) -> list[list[Compressed]]:
    """Encoder outputs as compressed images per row of the prompt in `inputs`."""
    needs = frozenset() if compressor is None else compressor.needs
    found = _collect_images(layout, outputs, inputs, prompt.rows)
    made = compress_images(found, compressor, collect_signals(needs, context, prompt))
    if compressor is not None and KEPT in context.shared:
        context.shared[KEPT].append((found, made))
    return made


def _collect_images(
    layout: FeatureLayout,
    outputs: Mapping[str, Any],
    inputs: Mapping[str, Any],
    rows: Sequence[Sequence[int]],
) -> list[list[Features]]:
    """Encoder outputs as images per row (token ids, no padding)."""
    found = [[] for _ in rows]  # type: list[list[Any]]
    for modality, output in outputs.items():
        images = split_features(
            layout.split_features(inputs, modality, output),
            rows,
            layout.placeholders[modality],
            partial(layout.grid, inputs, modality),
        )
        found = [old + new for old, new in zip(found, images, strict=True)]
    return found


def _project(image: Compressed, projector: nn.Module) -> Compressed:
    weight = next(projector.parameters())
    features = projector(image.features.to(weight.device, weight.dtype))
    return Compressed(features, image.positions, image.sizes)


def draft_request(context: Context) -> dict[str, Any]:
    """The request of a draft model: `drafter_inputs` override the target's inputs.

    Embeddings are the target's own: a prompt of embeddings alone is replaced by `drafter_inputs`.
    The target's encoder output is left out where there are other inputs to encode.
    """
    given, own = context.request.inputs, dict(context.request.drafter_inputs)
    own.pop(CAPTIONS, None)  # no input of a model
    if given.get("input_ids") is None:
        return own
    left = ("inputs_embeds", *(("encoder_outputs",) if own or "source_ids" in given else ()))
    rest = {name: value for name, value in given.items() if name not in left}
    return {**rest, **own}


def prompt_tokens(context: Context) -> list[list[int]]:
    """Prompt tokens per row, without padding."""
    own = context.request.drafter_inputs
    if context.request.inputs.get("input_ids") is None and "input_ids" in own:
        return remove_padding(own)[0]
    return [row[:length] for row, length in zip(context.history, context.prompt, strict=True)]


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Left-pad token rows into `input_ids` and `attention_mask`."""
    width = max(len(row) for row in rows)
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


DRAFT_INPUTS = ("nothing", "placeholders", "prompt", *COMPRESSIBLE)


def build_draft_inputs(kit: Kit) -> DraftInputs:
    """The inputs named by `kit.sees`, through `kit.compressor` if there is one.

    Raises ValueError for an unknown name (listing the known ones), for a compressor without
    features, and for features that do not fit the draft model.
    """
    assert kit.drafter is not None
    if kit.sees == "pixels":
        return (
            PixelInputs()
            if kit.compressor is None
            else compressed_pixels(kit.drafter, kit.compressor)
        )
    if kit.sees == "target-features":
        return target_features(kit)
    if kit.sees in DRAFT_INPUTS and kit.compressor is not None:
        raise ValueError(
            f"sees={kit.sees!r} has no image for compressor={kit.compressor!r}; "
            "give sees='pixels' or sees='target-features'"
        )
    needs_tokens = kit.sees != "prompt" or "input_ids" in _hf.forward_names(kit.target.model)
    encodes = isinstance(kit.drafter, EncoderDecoder)
    if encodes and needs_tokens and "input_ids" not in _hf.forward_names(kit.drafter.model):
        raise ValueError(
            f"sees={kit.sees!r} has tokens, but {type(kit.drafter.model).__name__} takes none in "
            "its encoder; give sees='pixels' where the target reads the same, or another model"
        )
    if kit.sees == "nothing":
        return TextInputs(kit.target.visual_ids)
    if kit.sees == "placeholders":
        return PlaceholderInputs()
    if kit.sees == "prompt":  # that of the target, guidance included
        return PixelInputs(name="prompt")
    raise ValueError(f"sees={kit.sees!r} is not known; choose one of {', '.join(DRAFT_INPUTS)}")


def compressed_pixels(drafter: Reader, compressor: Compressor | str) -> CompressedPixelInputs:
    """The draft model's own features, compressed. Raises ValueError where it has none."""
    drafter.check_features()
    drafter.check_embeddable()
    compressor = resolve_compressor(compressor, drafter, drafter.config.hidden_size)
    if "cls" in compressor.needs:
        ClassTokenTap(
            drafter.model, drafter.family
        )  # raises ValueError for towers without a class token
    return CompressedPixelInputs(drafter.feature_layout(), compressor)


def target_features(kit: Kit, remembers: bool = False) -> TargetFeatureInputs:
    """The target's projected features. Raises ValueError for a draft model of another width."""
    assert kit.drafter is not None
    source, own = kit.target.config.hidden_size, kit.drafter.config.hidden_size
    if source != own:
        raise ValueError(
            f"the target's vision features are {source} wide, but the draft model reads {own}; "
            "give one with a projector of its own, which `mmspec train massv` writes (recipe "
            "'massv'), or sees='pixels'"
        )
    compressor = (
        None
        if kit.compressor is None
        else resolve_compressor(kit.compressor, kit.target, source, remembers)
    )
    return TargetFeatureInputs(kit.target.feature_layout(), kit.target, compressor)


def resolve_compressor(
    given: Compressor | str, reader: Reader, width: int, remembers: bool = False
) -> Compressor:
    """The compressor, by name or as an object, for features of that width.

    `remembers`: the recipe records earlier images of a robot.

    Raises ValueError for an unknown name, for one that needs a signal which is not available, or
    text embeddings in the space of features of another width.
    """
    compressor = parse_compressor(given) if isinstance(given, str) else given
    check_needs(compressor)
    if compressor.needs & OF_ROBOTS and not remembers:
        raise ValueError(
            f"{type(compressor).__name__} needs a robot's earlier images, which only recipe "
            "'specprune-vla' records; use that recipe, or another compressor"
        )
    if "text" in compressor.needs and width != reader.config.hidden_size:
        raise ValueError(
            f"{type(compressor).__name__} compares images with text, but the features are "
            f"{width} wide and the embeddings of {type(reader.model).__name__} "
            f"{reader.config.hidden_size}; choose a compressor that needs no text"
        )
    return compressor.build(width, reader.model.get_input_embeddings().weight)


def check_token_prompts(reader: Reader, use: str) -> None:
    """Refuse a model whose prompts are not of its vocabulary, for a `use` that reads them again.

    Raises ValueError.
    """
    if not reader.has_token_prompts:
        raise ValueError(
            f"{use}, and the prompts of {type(reader.model).__name__} are not of its vocabulary; "
            "use another recipe, such as coupled"
        )
