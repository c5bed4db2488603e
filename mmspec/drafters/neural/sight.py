"""What a draft model sees of the picture: an explicit choice, and the inputs it leads to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec import _hf
from mmspec.compressors.contract import Compressed, Compressor, Grid, compressed, pictures
from mmspec.drafters.neural.embed_prompt import unpadded, weave
from mmspec.targets.backbone import Backbone
from mmspec.targets.context import Context


@dataclass(frozen=True)
class Nothing:
    """Text only: placeholder and frame tokens are taken out of the prompt (SPD-MLLM, 2024)."""

    hidden: tuple[int, ...] = ()  # ids to take out
    name: str = "nothing"

    def inputs(self, context: Context, backbone: Backbone) -> Mapping[str, Any]:
        hidden = set(self.hidden)
        rows = [[token for token in row if token not in hidden] for row in prompts(context)]
        return padded(rows, context.device)


@dataclass(frozen=True)
class Placeholders:
    """The prompt as it is, placeholders read as ordinary tokens; no picture."""

    name: str = "placeholders"

    def inputs(self, context: Context, backbone: Backbone) -> Mapping[str, Any]:
        return padded(prompts(context), context.device)


@dataclass(frozen=True)
class Pixels:
    """The whole request, through the draft model's own encoder."""

    name: str = "pixels"

    def inputs(self, context: Context, backbone: Backbone) -> Mapping[str, Any]:
        return {**context.request.inputs, **context.request.drafter_inputs}


@dataclass(frozen=True)
class Optics:
    """How a family's encoder outputs map to its prompt; `mmspec.modalities.vlm.optics` makes it."""

    placeholders: Mapping[str, int]  # "image" and "video" to the id that stands for its features
    grid: Callable[[Mapping[str, Any], int, int], Grid | None]  # (inputs, picture, features)
    parts: Callable[[Any], Sequence[Tensor]]  # an encoder's output as (n, H) features per picture


@dataclass(frozen=True)
class CompressedPixels:
    """The request through the draft model's encoder and a compressor, at the original slots."""

    optics: Optics  # the draft model's
    compressor: Compressor
    name: str = "pixels"

    @property
    def wants(self) -> frozenset[str]:
        return self.compressor.needs

    def inputs(self, context: Context, backbone: Backbone) -> Mapping[str, Any]:
        given = {**context.request.inputs, **context.request.drafter_inputs}
        outputs = _hf.encode_media(backbone.model, given)["mm_encoder_outputs"]
        visual = _see(self.optics, outputs, given, self.compressor, context)
        return weave(backbone, given, visual, tuple(self.optics.placeholders.values()))


@dataclass(frozen=True)
class TargetFeatures:
    """The target's own vision features, encoded once, at the original slots.

    They go through the compressor, then through the projector; both may be None. Features that a
    target adds inside its decoder (deepstack) are not among them.
    """

    optics: Optics  # the target's
    compressor: Compressor | None = None
    projector: nn.Module | None = None
    name: str = "target-features"

    @property
    def wants(self) -> frozenset[str]:
        needs = frozenset() if self.compressor is None else self.compressor.needs
        return frozenset({"vision"}) | needs

    def inputs(self, context: Context, backbone: Backbone) -> Mapping[str, Any]:
        given = context.request.inputs
        visual = _see(self.optics, context.shared["vision"], given, self.compressor, context)
        if self.projector is not None:
            visual = [[_projected(picture, self.projector) for picture in row] for row in visual]
        return weave(backbone, given, visual, tuple(self.optics.placeholders.values()))


def _see(
    optics: Optics,
    outputs: Mapping[str, Any],
    inputs: Mapping[str, Any],
    compressor: Compressor | None,
    context: Context,
) -> list[list[Compressed]]:
    """Encoder outputs as compressed pictures per row of the prompt in `inputs`."""
    rows, _ = unpadded(inputs)
    found = [[] for _ in rows]  # type: list[list[Any]]
    for modality, output in outputs.items():
        seen = pictures(
            optics.parts(output),
            rows,
            optics.placeholders[modality],
            lambda index, count: optics.grid(inputs, index, count),
        )
        found = [old + new for old, new in zip(found, seen, strict=True)]
    needs = frozenset() if compressor is None else compressor.needs
    signals = {  # without the padding of the target's prompt
        name: [row[pad:] for row, pad in zip(context.shared[name], context.padding, strict=True)]
        for name in needs
    }
    return compressed(found, compressor, signals)


def _projected(picture: Compressed, projector: nn.Module) -> Compressed:
    weight = next(projector.parameters())
    features = projector(picture.features.to(weight.device, weight.dtype))
    return Compressed(features, picture.positions, picture.sizes)


def prompts(context: Context) -> list[list[int]]:
    """Prompt tokens per row, without padding."""
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
