"""A tiny GLM-Image of the real classes: the model of tokens, and the pipeline with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature, GlmImageConfig, GlmImageForConditionalGeneration

from mmspec.modalities.diffusion.tiny_pipelines import build
from tests.toys.image_models import build_model

CODES, BOI, EOI, IMAGE = 64, 64, 65, 299


def token_model() -> Any:
    """The model of tokens; greedy also where the pipeline samples."""
    text = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vision_vocab_size": 80,
        "eos_token_id": EOI,
        "pad_token_id": 0,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
        },
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    config = GlmImageConfig(
        text_config=text,
        vision_config=vision | {"image_size": 64, "patch_size": 16},
        vq_config={"embed_dim": 16, "num_embeddings": CODES, "latent_channels": 32},
        image_token_id=IMAGE,
        image_start_token_id=BOI,
        image_end_token_id=EOI,
    )
    model = build_model(GlmImageForConditionalGeneration, config)
    with torch.no_grad():
        model.lm_head.weight[CODES:] = 0.0  # never the likeliest
    model.generation_config.pad_token_id = 0
    model.generation_config.top_k = 1
    return model


def request(rows: Sequence[Sequence[int]], height: int = 4, width: int = 6) -> dict[str, Tensor]:
    """What the processor makes of prompts: tokens, the large grid and the small one of each."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + [*row, BOI] for row in rows])
    grids = [[1, height, width], [1, height // 2, width // 2]]
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "image_grid_thw": torch.tensor(grids * len(rows)),
        "images_per_sample": torch.tensor([2] * len(rows)),
    }


class Processor:
    """A processor of two grids: every letter of a prompt is a token."""

    def apply_chat_template(
        self, messages: Any, target_h: int, target_w: int, **_: Any
    ) -> BatchFeature:
        texts = [one["content"][0]["text"] for (one,) in messages]
        rows = [[100 + ord(letter) % 100 for letter in text] for text in texts]
        return BatchFeature(request(rows, target_h // 32, target_w // 32))


def pipeline() -> Any:
    """The pipeline of both phases."""
    pipe = build("GlmImagePipeline")
    pipe.processor = Processor()
    pipe.vision_language_encoder = token_model()
    return pipe
