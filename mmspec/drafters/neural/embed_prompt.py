"""The prompt of a draft model with image features as embeddings, at their original slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.compressors.contract import Compressed
from mmspec.errors import check_embedded
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import count_padding

_TYPES = "token_type_ids"  # Gemma 3 and PaliGemma: bidirectional prompt tokens


def remove_padding(inputs: Mapping[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Prompt tokens per row, and the left padding that was removed."""
    ids = inputs.get("input_ids")
    if ids is None:
        raise ValueError(
            "a prompt of embeddings has no image tokens to put features at; pass input_ids"
        )
    pads = count_padding(inputs.get("attention_mask"), ids.shape[0])
    return [row[pad:] for row, pad in zip(ids.tolist(), pads, strict=True)], pads


def merge_visual_features(
    backbone: Reader,
    inputs: Mapping[str, Any],
    visual: Sequence[Sequence[Compressed]],
    placeholders: Sequence[int],
    weighted: bool = False,
) -> dict[str, Tensor]:
    """Inputs of the draft model's prefill: text embeddings, and `visual` features at their slots.

    `visual` is per row and image. Placeholders without a feature are left out and leave a gap in
    the position ids; rows are padded on the left. With `weighted` there is a "sizes" (B, W), the
    weight of each token in attention.
    """
    rows, pads = remove_padding(inputs)
    embed_tokens = backbone.model.get_input_embeddings()
    rope = _rope(backbone, inputs)
    embeds, positions, types, sizes = [], [], [], []
    for row, (ids, pictures) in enumerate(zip(rows, visual, strict=True)):
        check_embedded(max(set(ids).difference(placeholders), default=0), backbone.vocabulary)
        tokens = torch.tensor(ids, device=backbone.device)
        text = (~torch.isin(tokens, torch.tensor(placeholders, device=tokens.device))).nonzero()[
            :, 0
        ]
        values = embed_tokens(tokens[text])
        slots = torch.cat((text, *(image.positions.to(text.device) for image in pictures)))
        order = slots.argsort(stable=True)
        visual_features = [image.features.to(values.device, values.dtype) for image in pictures]
        embeds.append(torch.cat((values, *visual_features))[order])
        slots = slots[order]
        counts = [image.sizes.to(order.device) for image in pictures]
        sizes.append(torch.cat((torch.ones_like(text), *counts))[order])
        positions.append(slots if rope is None else rope[:, row, pads[row] + slots])
        if inputs.get(_TYPES) is not None:
            types.append(inputs[_TYPES][row, pads[row] + slots])
    outputs = {
        "inputs_embeds": _pad_left(embeds, dim=0),
        "attention_mask": _pad_left(
            [row.new_ones(len(row), dtype=torch.int64) for row in embeds], 0
        ),
        "position_ids": _pad_left(positions, dim=-1),
    }
    if rope is not None:
        outputs["position_ids"] = outputs["position_ids"].transpose(0, 1)  # (axes, B, W)
    if types:
        outputs[_TYPES] = _pad_left(types, dim=0)
    if weighted:
        outputs["sizes"] = _pad_left(sizes, dim=0).clamp_min(1)
    return outputs


def _rope(backbone: Reader, inputs: Mapping[str, Any]) -> Tensor | None:  # (axes, B, L)
    """Rotary positions of the whole prompt where they differ from its slots (M-RoPE)."""
    if "position_ids" not in _hf.forward_names(backbone.model):
        return None
    found = _hf.make_prompt_positions(backbone.model, inputs)
    if found.dim() == 3:
        positions = found[1:] if len(found) > 3 else found  # the first of four is text order
        return positions.expand(-1, len(inputs["input_ids"]), -1)
    axes = backbone.family.rope_axes  # a text-only prompt
    return None if axes == 1 else found.expand(axes, len(inputs["input_ids"]), -1)


def _pad_left(rows: Sequence[Tensor], dim: int) -> Tensor:
    """Stack rows that differ in length along `dim`, padded on the left with zeros."""
    width = max(row.shape[dim] for row in rows)
    padded = []
    for row in rows:
        shape = list(row.shape)
        shape[dim] = width - row.shape[dim]
        padded.append(torch.cat((row.new_zeros(shape), row), dim))
    return torch.stack(padded)
