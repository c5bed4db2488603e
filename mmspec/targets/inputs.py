"""The tensors of a request, looked at before any forward: their kind, shape and range."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

IDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "decoder_input_ids")
AXES = {**dict.fromkeys(IDS, 2), "inputs_embeds": 3}
SHAPES = {2: "(rows, tokens)", 3: "(rows, tokens, width)"}
MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "caption", "caption_mask")


def check_inputs(
    inputs: Mapping[str, Any],
    vocabulary: int | None = None,
    beyond: Collection[int] = (),
    device: torch.device | None = None,
) -> None:
    """Refuse tensors that no forward can read. Raises ValueError naming the first one.

    Ids lie within the `vocabulary` or are one of `beyond` (placeholders of pictures); a mask holds
    zeros and ones, as many as there are tokens; everything has as many rows.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    for name in (*AXES, *MEDIA):
        if name in given:
            _check_kind(name, given[name])
    ids = given.get("input_ids", given.get("inputs_embeds"))
    if ids is None:
        _check_mask("caption_mask", given.get("caption_mask"))
        return
    if device is not None and ids.device.type != device.type:
        raise ValueError(
            f"input_ids lie on {ids.device}, but the model on {device}; pass inputs.to({device})"
        )
    if "input_ids" in given and vocabulary is not None:
        _check_range(ids, vocabulary, beyond)
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in given and given[name].shape != ids.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(given[name].shape)}, but the prompt "
                f"{tuple(ids.shape[:2])}; pass what the processor makes of one and the same text"
            )
    _check_mask("attention_mask", given.get("attention_mask"))


def _check_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None and not bool(((mask == 0) | (mask == 1)).all()):
        odd = mask[(mask != 0) & (mask != 1)].flatten()[0].item()
        raise ValueError(f"{name} holds {odd}; give 1 for tokens that are read and 0 for padding")


def _check_kind(name: str, value: Any) -> None:
    """A tensor of so many axes, of whole numbers where they are ids."""
    if name in MEDIA and isinstance(value, list | tuple) and value:
        for one in value:  # pictures of different sizes
            _check_kind(name, one)
        return
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} is a {type(value).__name__}, no tensor; pass what the model's processor makes "
            'with return_tensors="pt"'
        )
    axes = AXES.get(name)
    if axes is not None and value.dim() != axes:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; give {SHAPES[axes]}, also of a single row"
        )
    is_whole = value.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    if name.endswith("ids") and not is_whole:
        raise ValueError(f"{name} are {value.dtype}; give ids as whole numbers, torch.int64")
    if value.is_complex() or value.is_meta:
        raise ValueError(f"{name} is {value.dtype} on {value.device}; give real numbers in memory")
    if not value.shape[0]:
        raise ValueError(f"{name} has no rows; give one per prompt")
    if name in MEDIA and not bool(torch.isfinite(value).all()):
        raise ValueError(
            f"{name} holds NaN or infinite numbers; check what it was made of, or make it with the "
            "model's processor"
        )


def _check_range(ids: Tensor, vocabulary: int, beyond: Collection[int]) -> None:
    wrong = (ids < 0) | (ids >= vocabulary)
    for known in beyond:
        wrong &= ids != known
    if bool(wrong.any()):
        raise ValueError(
            f"input_ids hold {ids[wrong][0].item()}, but the model has {vocabulary} tokens; "
            "make them with the model's own processor"
        )
