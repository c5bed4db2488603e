"""What a draft model sees of the picture: an explicit choice, and the inputs it leads to."""

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
from mmspec.compressors import named
from mmspec.compressors.contract import (
    OF_ROBOTS,
    Compressed,
    Compressor,
    Features,
    check_needs,
    compressed,
    keep_all,
    pictures,
)
from mmspec.declared import declared
from mmspec.drafters.neural.embed_prompt import unpadded, weave
from mmspec.drafters.neural.signals import Seen, signals, wanted
from mmspec.recipe import COMPRESSIBLE, Kit
from mmspec.targets.readers.attention_tap import ClassTokenTap
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Reader
from mmspec.targets.readers.visual import FeatureLayout
from mmspec.targets.tokens.context import Context


class Sight(ABC):
    """What a draft model sees of a request: the inputs of its own prefill."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What a run reports."""

    @declared
    def wants(self) -> frozenset[str]:
        """What the target shall offer, as for a `Drafter`."""
        return frozenset()

    @abstractmethod
    def inputs(self, context: Context, backbone: Reader) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Nothing(Sight):
    """Text only: placeholder and frame tokens are taken out of the prompt (SPD-MLLM, 2024)."""

    hidden: tuple[int, ...] = ()  # ids to take out
    name: str = "nothing"

    def inputs(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        hidden = set(self.hidden)
        rows = [[token for token in row if token not in hidden] for row in prompts(context)]
        return padded(rows, context.device)


@dataclass(frozen=True)
class Placeholders(Sight):
    """The prompt as it is, placeholders read as ordinary tokens; no picture."""

    name: str = "placeholders"

    def inputs(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        return padded(prompts(context), context.device)


@dataclass(frozen=True)
class Pixels(Sight):
    """The whole request, through the draft model's own encoder."""

    name: str = "pixels"

    def inputs(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        given, dtype = own_request(context), backbone.model.dtype
        media = {name: given.get(name) for name in backbone.family.media}
        seen = {name: one for name, one in media.items() if isinstance(one, Tensor)}
        return {**given, **{name: one.to(dtype) for name, one in seen.items()}}


@dataclass(frozen=True)
class CompressedPixels(Sight):
    """The request through the draft model's encoder and a compressor, at the original slots."""

    layout: FeatureLayout  # the draft model's
    compressor: Compressor
    name: str = "pixels"

    @property
    def wants(self) -> frozenset[str]:
        return wanted(self.compressor.needs)

    def inputs(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        given = own_request(context)
        token = None
        if "cls" in self.compressor.needs:
            token = ClassTokenTap(backbone.model, backbone.family)
        with token or nullcontext():
            outputs = _hf.encode_media(backbone.model, given)["mm_encoder_outputs"]
        seen = _seen(given, backbone, () if token is None else token.attention)
        visual = _see(self.layout, outputs, given, self.compressor, context, seen)
        marks = tuple(self.layout.placeholders.values())
        return weave(backbone, given, visual, marks, self.compressor.weighted)


@dataclass(frozen=True)
class TargetFeatures(Sight):
    """The target's own vision features, encoded once, at the original slots.

    They go through the compressor, then through the projector; both may be None. Features that a
    target adds inside its decoder (deepstack) are not among them.
    """

    layout: FeatureLayout  # the target's
    target: Reader
    compressor: Compressor | None = None
    projector: nn.Module | None = None
    name: str = "target-features"

    @property
    def wants(self) -> frozenset[str]:
        needs = frozenset() if self.compressor is None else self.compressor.needs
        return frozenset({"vision"}) | wanted(needs) | (needs & {"cls"})

    def seen(self, context: Context) -> list[list[Compressed]]:
        """The pictures of every row, thinned."""
        given = context.request.inputs
        seen = _seen(given, self.target, context.shared["cls"] or ())
        outputs = context.shared["vision"]
        return _see(self.layout, outputs, given, self.compressor, context, seen)

    def unthinned(self, given: Mapping[str, Any], backbone: Reader) -> Mapping[str, Any]:
        """The same inputs outside a request, as training has them; the target encodes pictures."""
        with torch.no_grad():
            outputs = _hf.encode_media(self.target.model, given).get("mm_encoder_outputs", {})
        found = _pictures(self.layout, outputs, given, unpadded(given)[0])
        visual = [[keep_all(picture) for picture in row] for row in found]
        return self._woven(given, visual, backbone)

    def inputs(self, context: Context, backbone: Reader) -> Mapping[str, Any]:
        return self._woven(context.request.inputs, self.seen(context), backbone)

    def _woven(
        self, given: Mapping[str, Any], visual: list[list[Compressed]], backbone: Reader
    ) -> Mapping[str, Any]:
        if self.projector is not None:
            visual = [[_projected(picture, self.projector) for picture in row] for row in visual]
        is_weighted = self.compressor is not None and self.compressor.weighted
        marks = tuple(self.layout.placeholders.values())
        return weave(backbone, given, visual, marks, is_weighted)


def _seen(inputs: Mapping[str, Any], reader: Reader, cls: Sequence[Tensor]) -> Seen:
    """The prompt of `inputs`, as `reader`, whose features these are, has it."""
    rows, _ = unpadded(inputs)
    placeholder = reader.placeholder_ids[0]
    return Seen(rows, frozenset(reader.visual_ids), reader.embed, cls, placeholder)


def _see(
    layout: FeatureLayout,
    outputs: Mapping[str, Any],
    inputs: Mapping[str, Any],
    compressor: Compressor | None,
    context: Context,
    seen: Seen,
) -> list[list[Compressed]]:
    """Encoder outputs as compressed pictures per row of the prompt in `inputs`."""
    needs = frozenset() if compressor is None else compressor.needs
    found = _pictures(layout, outputs, inputs, seen.rows)
    return compressed(found, compressor, signals(needs, context, seen))


def _pictures(
    layout: FeatureLayout,
    outputs: Mapping[str, Any],
    inputs: Mapping[str, Any],
    rows: Sequence[Sequence[int]],
) -> list[list[Features]]:
    """Encoder outputs as pictures per row (token ids, no padding)."""
    found = [[] for _ in rows]  # type: list[list[Any]]
    for modality, output in outputs.items():
        laid = pictures(
            layout.laid(inputs, modality, output),
            rows,
            layout.placeholders[modality],
            partial(layout.grid, inputs, modality),
        )
        found = [old + new for old, new in zip(found, laid, strict=True)]
    return found


def _projected(picture: Compressed, projector: nn.Module) -> Compressed:
    weight = next(projector.parameters())
    features = projector(picture.features.to(weight.device, weight.dtype))
    return Compressed(features, picture.positions, picture.sizes)


def own_request(context: Context) -> dict[str, Any]:
    """The request as a draft model gets it: `drafter_inputs` replace the target's.

    Embeddings are the target's own: a prompt of them alone is left to `drafter_inputs`. What its
    encoder made is left out where there is something else to encode.
    """
    given, own = context.request.inputs, context.request.drafter_inputs
    if given.get("input_ids") is None:
        return dict(own)
    left = ("inputs_embeds", *(("encoder_outputs",) if own or "source_ids" in given else ()))
    rest = {name: value for name, value in given.items() if name not in left}
    return {**rest, **own}


def prompts(context: Context) -> list[list[int]]:
    """Prompt tokens per row, without padding."""
    own = context.request.drafter_inputs
    if context.request.inputs.get("input_ids") is None and "input_ids" in own:
        return unpadded(own)[0]
    return [row[:length] for row, length in zip(context.history, context.prompt, strict=True)]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Left-pad token rows into `input_ids` and `attention_mask`."""
    width = max(len(row) for row in rows)
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


SIGHTS = ("nothing", "placeholders", "prompt", *COMPRESSIBLE)


def sight(kit: Kit) -> Sight:
    """The sight named by `kit.sees`, through `kit.compressor` if there is one.

    Raises ValueError for an unknown name (listing the known ones), for a compressor of nothing,
    and for features that do not fit the draft model.
    """
    assert kit.drafter is not None
    if kit.sees == "pixels":
        return (
            Pixels() if kit.compressor is None else compressed_pixels(kit.drafter, kit.compressor)
        )
    if kit.sees == "target-features":
        return target_features(kit)
    if kit.sees in SIGHTS and kit.compressor is not None:
        raise ValueError(
            f"sees={kit.sees!r} shows no picture that compressor={kit.compressor!r} could thin; "
            "give sees='pixels' or sees='target-features'"
        )
    shows_tokens = kit.sees != "prompt" or "input_ids" in _hf.forward_names(kit.target.model)
    encodes = isinstance(kit.drafter, EncoderDecoder)
    if encodes and shows_tokens and "input_ids" not in _hf.forward_names(kit.drafter.model):
        raise ValueError(
            f"sees={kit.sees!r} shows tokens, but {type(kit.drafter.model).__name__} reads none in "
            "its encoder; give sees='pixels' where the target reads the same, or another model"
        )
    if kit.sees == "nothing":
        return Nothing(kit.target.visual_ids)
    if kit.sees == "placeholders":
        return Placeholders()
    if kit.sees == "prompt":  # as the target has it, guidance included
        return Pixels(name="prompt")
    raise ValueError(f"sees={kit.sees!r} is not known; choose one of {', '.join(SIGHTS)}")


def compressed_pixels(drafter: Reader, compressor: Compressor | str) -> CompressedPixels:
    """The draft model's own features, thinned. Raises ValueError where it has none to thin."""
    drafter.check_features()
    drafter.check_embeddable()
    thinning = checked(compressor, drafter, drafter.config.hidden_size)
    if "cls" in thinning.needs:
        ClassTokenTap(drafter.model, drafter.family)  # refuses towers without a class token
    return CompressedPixels(drafter.feature_layout(), thinning)


def target_features(kit: Kit, remembers: bool = False) -> TargetFeatures:
    """The target's projected features. Raises ValueError for a draft model of another width."""
    assert kit.drafter is not None
    source, own = kit.target.config.hidden_size, kit.drafter.config.hidden_size
    if source != own:
        raise ValueError(
            f"the target's vision features are {source} wide, but the draft model reads {own}; use "
            "a draft model with a projector (recipe='massv'), or sees='pixels'"
        )
    thinning = (
        None if kit.compressor is None else checked(kit.compressor, kit.target, source, remembers)
    )
    return TargetFeatures(kit.target.feature_layout(), kit.target, thinning)


def checked(
    given: Compressor | str, reader: Reader, width: int, remembers: bool = False
) -> Compressor:
    """The compressor, or the one of that name, for features of that width beside `reader`'s words.

    `remembers` is whether somebody notes what a robot saw.

    Raises ValueError for an unknown name, for one that needs a signal which nobody gives, or words
    in the space of features that are not in it.
    """
    compressor = named(given) if isinstance(given, str) else given
    check_needs(compressor)
    if compressor.needs & OF_ROBOTS and not remembers:
        raise ValueError(
            f"{type(compressor).__name__} goes by what a robot saw before, which only recipe "
            "'specprune-vla' remembers; use that recipe, or another compressor"
        )
    if "text" in compressor.needs and width != reader.config.hidden_size:
        raise ValueError(
            f"{type(compressor).__name__} compares pictures with words, but the features are "
            f"{width} wide and the embeddings of {type(reader.model).__name__} "
            f"{reader.config.hidden_size}; choose a compressor that needs no text"
        )
    return compressor.fitted(width, reader.model.get_input_embeddings().weight)
