"""Janus draws with a head and a table of their own behind its language model.

Chen et al. 2025 ("Janus-Pro"). The prompt is text and ends with begin-of-image; from there on
embeddings are those of codes, and the head speaks of codes only. The unconditional prompt is the
prompt with all but its begin tokens padded over.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspec.backbone import Family
from mmspec.codes import CodeBackbone, Tables, counted, foreign
from mmspec.grid import Grid
from mmspec.images import Painter, codebook, token_request

FAMILY = Family("Janus", direct=True, draws=True, writes=False)


def reader(model: Any) -> CodeBackbone:
    """The picture side of a `JanusForConditionalGeneration`."""
    inner = model.model

    def prompt(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        embeds: Tensor = model.get_input_embeddings()(inputs["prompt_ids"])
        return embeds, counted(inputs["attention_mask"])

    tables = Tables(
        inner.language_model,
        inner.generation_head,
        model.prepare_embeddings_for_image_generation,
        prompt,
        inner.generation_head.vision_head.out_features,
    )
    return CodeBackbone(model, FAMILY, model.config.get_text_config(decoder=True), tables)


def painter(model: Any) -> Painter:
    """How a `JanusForConditionalGeneration` draws: one square, of the size it was trained for."""
    name, weight = type(model).__name__, model.model.vqmodel.quantize.embedding.weight
    side = model.config.vq_config.num_patches
    count = model.model.generation_head.vision_head.out_features

    def layout(height: int, width: int) -> Grid:
        if (height, width) != (side, side):
            raise ValueError(
                f"grid=({height}, {width}) does not fit: Janus draws {side} x {side} codes; drop "
                "grid="
            )
        return Grid(side, side, (0, count))

    def decode(codes: Tensor) -> Tensor:
        pixels: Tensor = model.decode_image_tokens(codes.flatten(1)).permute(0, 3, 1, 2)
        return pixels

    return Painter(
        name=name,
        codebook=codebook(name, weight, torch.arange(count), count, "normalised"),
        layout=layout,
        size=(side, side),
        guidance=5.0,
        decode=decode,
        inputs=("input_ids", "attention_mask"),
        request=request,
        unconditional=partial(unconditional, model),
    )


def request(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt's ids stand aside: they are not of the vocabulary of codes."""
    given = token_request(inputs)
    mask = given["attention_mask"]
    return {"input_ids": foreign(mask), "attention_mask": mask, "prompt_ids": given["input_ids"]}


def unconditional(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but begin-of-sequence and begin-of-image becomes padding that is read."""
    config = model.generation_config
    begin = (config.generation_kwargs or {}).get("boi_token_id")
    if begin is None or config.pad_token_id is None:
        raise ValueError(
            "guidance needs the begin-of-image and padding ids of Janus, which its generation "
            "config lacks; set generation_kwargs={'boi_token_id': ...} and pad_token_id, or give "
            "negative="
        )
    ids = inputs["prompt_ids"]
    kept = (ids == begin) | (ids == (-1 if config.bos_token_id is None else config.bos_token_id))
    return {**inputs, "prompt_ids": ids.masked_fill(~kept, config.pad_token_id)}
