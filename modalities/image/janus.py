"""Janus generates with a separate head and embedding table on its language model.

Chen et al. 2025 ("Janus-Pro"). The prompt is text and ends with begin-of-image; all later
embeddings are those of codes, and the head predicts codes only. The unconditional prompt is the
prompt with all tokens but the begin tokens replaced by padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.codes.image_family import ImageFamily, make_codebook, make_encoder
from mmspec.distributions.sampling import Sampling
from mmspec.modalities.common.chat_template import apply_chat_template
from mmspec.modalities.image.generation import fixed_layout, token_request, tokenize_prompts
from mmspec.targets.readers.code_backbone import (
    CodeBackbone,
    Tables,
    count_positions,
    make_foreign_ids,
)
from mmspec.targets.readers.guidance import SCALE
from mmspec.targets.readers.reader import Family


def reader(model: Any) -> CodeBackbone:
    """The reader of the image tokens of a `JanusForConditionalGeneration`."""
    inner = model.model

    def prompt(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        embeds: Tensor = model.get_input_embeddings()(inputs["prompt_ids"])
        return embeds, count_positions(inputs["attention_mask"])

    tables = Tables(
        inner.language_model,
        inner.generation_head,
        model.prepare_embeddings_for_image_generation,
        prompt,
        inner.generation_head.vision_head.out_features,
    )
    return CodeBackbone(model, FAMILY, model.config.get_text_config(decoder=True), tables)


def image_family(model: Any) -> ImageFamily:
    """The image family of a `JanusForConditionalGeneration`: the square size it was trained for."""
    name, weight = type(model).__name__, model.model.vqmodel.quantize.embedding.weight
    count, size = model.model.generation_head.vision_head.out_features, only_size(model.config)
    book = make_codebook(name, weight, torch.arange(count), count, "normalised")

    def decode(codes: Tensor) -> Tensor:
        pixels: Tensor = model.decode_image_tokens(codes.flatten(1)).permute(0, 3, 1, 2)
        return pixels

    return ImageFamily(
        name=name,
        codebook=book,
        layout=fixed_layout("Janus", size, count),
        size=size,
        guidance=5.0,
        decode=decode,
        inputs=("input_ids", "attention_mask"),
        request=partial(request, model),
        unconditional=partial(unconditional, model),
        tokenize_prompts=words,
        native_generate=partial(peer, model),
        encode=make_encoder(model.model.vqmodel, book),
    )


def words(processor: Any, texts: Sequence[str], grid: Grid) -> Mapping[str, Any]:
    """Prompts in the model's chat template, if it has one, followed by begin-of-image."""
    if processor.chat_template:
        turns = [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
        texts = apply_chat_template(processor, turns, add_generation_prompt=True, tokenize=False)
    return tokenize_prompts(processor, texts, generation_mode="image")


def peer(model: Any, inputs: Mapping[str, Any], sampling: Sampling) -> Tensor:  # (B, L)
    """The loop of transformers with the global random numbers of torch. Guidance is required."""
    sequences: Tensor = model.generate(
        inputs=inputs["prompt_ids"],
        attention_mask=inputs["attention_mask"],
        generation_mode="image",
        guidance_scale=inputs[SCALE],
        do_sample=sampling.do_sample,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    return sequences


def request(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Pass the prompt ids under another name: they are not in the vocabulary of codes.

    A mask is needed where ids are padded: the padding id also occurs in unconditional prompts.
    """
    given = token_request(model, model.get_input_embeddings().weight.shape[0], inputs)
    pad = model.generation_config.pad_token_id
    if inputs.get("attention_mask") is None and bool((given["input_ids"] == pad).any()):
        raise ValueError(
            f"input_ids hold the padding id {pad}, which Janus may also read, and there is no "
            "attention_mask to distinguish them; pass the processor's"
        )
    mask = given["attention_mask"]
    return {
        "input_ids": make_foreign_ids(mask),
        "attention_mask": mask,
        "prompt_ids": given["input_ids"],
    }


def unconditional(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace all but begin-of-sequence and begin-of-image by padding that is attended to."""
    config = model.generation_config
    begin = (config.generation_kwargs or {}).get("boi_token_id")
    if begin is None or config.pad_token_id is None:
        raise ValueError(
            "guidance needs the begin-of-image and padding ids of Janus, which its generation "
            "config lacks; set generation_kwargs={'boi_token_id': ...} and pad_token_id, or give "
            "negative="
        )
    ids = inputs["prompt_ids"]
    special = (ids == begin) | (ids == (-1 if config.bos_token_id is None else config.bos_token_id))
    return {**inputs, "prompt_ids": ids.masked_fill(~special, config.pad_token_id)}


def only_size(config: Any) -> tuple[int, int]:
    """The only image size: rows and columns of codes."""
    return (config.vq_config.num_patches,) * 2


FAMILY = Family(
    "Janus", is_direct=True, image_family=image_family, writes_text=False, fixed_size=only_size
)
