"""Small Prismatic models of the real classes, with random weights."""

from __future__ import annotations

from typing import Any

from mmspec.models.loading import random_model
from mmspec.models.prismatic import OpenVLAForActionPrediction, PrismaticForConditionalGeneration
from mmspec.models.prismatic_config import DINO_SIGLIP, OpenVLAConfig, PrismaticConfig

SIDE, PATCHES, VOCAB, WORDS, BOS = 64, 16, 384, 320, 1
DINO = {"embed_dim": 32, "depth": 3, "num_heads": 2, "patch_size": 16, "init_values": 0.5}
SIGLIP = {"embed_dim": 48, "depth": 3, "num_heads": 2, "patch_size": 16}
SPAN = {"q01": [-0.5] * 6 + [0.0], "q99": [0.25] * 6 + [1.0], "mask": [True] * 6 + [False]}


def text_config(**facts: Any) -> dict[str, Any]:
    """A Llama of two layers; action ids are the last 256 of `WORDS`."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    return {"model_type": "llama", "vocab_size": VOCAB, **sizes, **heads, **facts}


def openvla_config(**facts: Any) -> OpenVLAConfig:
    """Both towers, at a small size."""
    given = {
        "timm_kwargs": [DINO, SIGLIP],
        "image_sizes": [SIDE, SIDE],
        "text_config": text_config(),
        "pad_token_id": WORDS,
        "norm_stats": {"toy": {"action": SPAN}},
    }
    return OpenVLAConfig(**{**given, **facts})


def openvla(seed: int = 0, **facts: Any) -> OpenVLAForActionPrediction:
    """A policy of seven dimensions."""
    config = openvla_config(**facts)
    model: OpenVLAForActionPrediction = random_model(
        lambda: OpenVLAForActionPrediction(config), seed
    )
    return model


def prismatic(seed: int = 0) -> PrismaticForConditionalGeneration:
    """A model that sees by one tower."""
    config = PrismaticConfig(
        timm_model_ids=[DINO_SIGLIP[1]],
        timm_kwargs=[SIGLIP],
        image_sizes=[SIDE],
        text_config=text_config(),
        pad_token_id=WORDS,
    )
    model: PrismaticForConditionalGeneration = random_model(
        lambda: PrismaticForConditionalGeneration(config), seed
    )
    return model
