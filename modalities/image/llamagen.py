"""LlamaGen, conditioned on a class or on caption features (Sun et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.image_family import ImageFamily, make_codebook
from mmspec.errors import is_integer
from mmspec.modalities.image.generation import fixed_layout
from mmspec.models.llamagen import LlamaGenForImageGeneration
from mmspec.targets.readers.code_backbone import CodeBackbone, Tables, make_foreign_ids
from mmspec.targets.readers.reader import Family
from mmspec.targets.tokens.context import check_inputs


def reader(model: LlamaGenForImageGeneration) -> CodeBackbone:
    """The reader of a LlamaGen model; condition slots count as positions, padded or not."""
    inner = model.model

    def prompt(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        embeds: Tensor = inner.condition(inputs["condition"])
        return embeds, torch.arange(embeds.shape[1], device=embeds.device)[None]

    tables = Tables(inner, model.lm_head, inner.embed_tokens, prompt, model.config.vocab_size)
    return CodeBackbone(model, FAMILY, model.config, tables)


def image_family(model: LlamaGenForImageGeneration) -> ImageFamily:
    """The image family of a LlamaGen model: one square size, the one it was trained for."""
    name = type(model).__name__
    vq, size, count = model.vqmodel, only_size(model.config), model.config.vocab_size
    if vq is None:
        raise ValueError(
            f"{name} has no image decoder; give its configuration a vq_config "
            "and load the tokeniser's weights, or convert both published files (mmspec convert)"
        )

    return ImageFamily(
        name=name,
        codebook=make_codebook(name, vq.embedding.weight, torch.arange(count), count, "normalised"),
        layout=fixed_layout("this LlamaGen", size, count),
        size=size,
        guidance=4.0 if model.config.condition == "class" else 7.5,
        decode=vq.decode,
        inputs=("class_ids",) if model.config.condition == "class" else ("caption", "caption_mask"),
        request=partial(request, model),
        unconditional=partial(unconditional, model),
    )


def request(model: LlamaGenForImageGeneration, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """`class_ids` (B,), or `caption` features (B, T, C), padded on the left by `caption_mask`."""
    config = model.config
    name = "class_ids" if config.condition == "class" else "caption"
    if name not in inputs:
        got = f", not on {', '.join(inputs)}" if inputs else ""
        raise ValueError(f"this LlamaGen is conditioned on a {config.condition}{got}; give {name}")
    if config.condition == "class":
        given = inputs["class_ids"]
        if isinstance(given, Tensor) and given.is_meta:
            raise ValueError("class_ids are on the meta device; give numbers in memory")
        listed = given.tolist() if isinstance(given, Tensor) else given
        listed = listed if isinstance(listed, list | tuple) else [listed]
        if not listed or not all(is_integer(one) for one in listed):
            raise ValueError(
                f"class_ids={given!r} are not classes; give a number or a list of them"
            )
        classes = torch.as_tensor(listed, device=model.device).reshape(-1, 1)
        if not 0 <= int(classes.min()) <= int(classes.max()) < config.num_classes:
            raise ValueError(
                f"class_ids={classes[:, 0].tolist()} must be in the range of the "
                f"{config.num_classes} classes of this model; give numbers from 0 up"
            )
        mask = torch.ones_like(classes)
        return {"input_ids": make_foreign_ids(mask), "attention_mask": mask, "condition": classes}
    check_inputs(inputs)
    caption: Tensor = inputs["caption"]
    expected = (config.condition_length, config.caption_size)
    if caption.dim() != 3 or tuple(caption.shape[1:]) != expected:
        raise ValueError(
            f"caption has shape {tuple(caption.shape)}, but this model reads (B, {expected[0]}, "
            f"{expected[1]}); pad the text encoder's features on the left"
        )
    given = inputs.get("caption_mask")
    mask = caption.new_ones(caption.shape[:2]) if given is None else given
    if mask.shape != caption.shape[:2]:
        raise ValueError(
            f"caption_mask has shape {tuple(mask.shape)}, but the features "
            f"{tuple(caption.shape[:2])}; give one number per feature"
        )
    mask = mask.long()
    return {"input_ids": make_foreign_ids(mask), "attention_mask": mask, "condition": caption}


def unconditional(model: LlamaGenForImageGeneration, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The null class, or the learned features of the empty caption with the same mask."""
    given = inputs["condition"]
    if model.config.condition == "class":
        return {**inputs, "condition": torch.full_like(given, model.config.num_classes)}
    learned: Any = model.model.condition.unconditional
    return {**inputs, "condition": learned.to(given).expand_as(given)}


def only_size(config: Any) -> tuple[int, int]:
    """The only image size: rows and columns of codes."""
    return (config.side,) * 2


FAMILY = Family(
    "LlamaGen", is_direct=True, image_family=image_family, writes_text=False, fixed_size=only_size
)
