"""Architectures of the bundled language models: narrow configurations of transformers classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from mmspec.zoo.scene import BOARD
from mmspec.zoo.scene_tensors import PIXELS
from tools.zoo.vlm.processors import LLAVA_PATCH, QWEN_MERGE, QWEN_PATCH


@dataclass(frozen=True)
class LanguageShape:
    """The size of a model. `vision_layers` = 0 builds a text model.

    The first `windowed_layers` of a Qwen2.5-VL tower attend within one cell of the board.
    """

    layers: int
    width: int
    inner: int
    heads: int
    vision_layers: int = 0
    vision_width: int = 0
    windowed_layers: int = 0


LLAVA_TARGET = LanguageShape(24, 96, 192, 3, vision_layers=3, vision_width=96)
QWEN_TARGET = LanguageShape(24, 96, 192, 3, vision_layers=4, vision_width=64, windowed_layers=1)
CLIP_TARGET = QWEN_TARGET
SIGHTED = LanguageShape(1, 128, 256, 4, vision_layers=1, vision_width=64)
BLIND = LanguageShape(1, 128, 256, 4)


def llava(shape: LanguageShape, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a LLaVA model (CLIP vision tower, Llama text), or Llama without vision layers."""
    text = LlamaConfig(**_text(shape, tokenizer))
    if not shape.vision_layers:
        return LlamaForCausalLM(text)
    vision = CLIPVisionConfig(
        hidden_size=shape.vision_width,
        intermediate_size=5 * shape.vision_width // 2,
        num_hidden_layers=shape.vision_layers,
        num_attention_heads=shape.vision_width // 32,
        image_size=PIXELS,
        patch_size=LLAVA_PATCH,
        hidden_act="gelu",
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.get_vocab()["<image>"],
        image_seq_length=(PIXELS // LLAVA_PATCH) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def qwen(shape: LanguageShape, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a Qwen2.5-VL model with multimodal RoPE, or Qwen2 without vision layers."""
    text = _text(shape, tokenizer)
    if not shape.vision_layers:
        return Qwen2ForCausalLM(Qwen2Config(**text))
    half = shape.width // shape.heads // 2
    # Small images need high frequencies: an image is 6 columns wide, not hundreds. Rows and columns
    # get all but the highest frequency; large models give them the low ones.
    sections = [1, 2, half - 3]
    text["rope_parameters"] |= {"rope_type": "default", "mrope_section": sections}
    vision = {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_width,
        "intermediate_size": 5 * shape.vision_width // 2,
        "num_heads": shape.vision_width // 32,
        "patch_size": QWEN_PATCH,
        "spatial_merge_size": QWEN_MERGE,
        "temporal_patch_size": 2,
        "window_size": PIXELS // BOARD,
        "fullatt_block_indexes": list(range(shape.windowed_layers, shape.vision_layers)),
        "out_hidden_size": shape.width,
    }
    ids = tokenizer.get_vocab()
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def clip_qwen(shape: LanguageShape, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a Qwen2.5-VL model for clips of a few seconds: one position per second.

    Time has the four highest frequencies, the lowest of which rotates by half a turn over the clip,
    so that order is resolved. Rows have the next one, columns the rest.
    """
    config: Any = qwen(shape, tokenizer).config
    half = shape.width // shape.heads // 2
    config.text_config.rope_parameters |= {"mrope_section": [4, 1, half - 5]}
    config.text_config.max_position_embeddings = 4096
    config.vision_config.tokens_per_second = 1
    return Qwen2_5_VLForConditionalGeneration(config)


def _text(shape: LanguageShape, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.04,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
