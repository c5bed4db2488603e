"""The one decoder is transformers' for Janus, and so LlamaGen's; Chameleon's has its names."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.testing import assert_close
from transformers.models.janus.configuration_janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAE

from mmspec.models.llamagen_vq import LlamaGenVQ, LlamaGenVQConfig
from mmspec.models.vqgan_decoder import VQGANDecoder
from tests.toys import image_models

SHAPE: dict[str, Any] = {"embed_dim": 8, "num_embeddings": 40, "latent_channels": 8}
LEVELS: dict[str, Any] = {"base_channels": 32, "channel_multiplier": [1, 2, 2], "num_res_blocks": 2}


@torch.no_grad()
def test_codes_become_the_pixels_of_transformers_janus() -> None:
    theirs: Any = JanusVQVAE(JanusVQVAEConfig(**SHAPE, **LEVELS, num_patches=3))
    ours = LlamaGenVQ(LlamaGenVQConfig(**SHAPE, **LEVELS))
    for weight in theirs.parameters():  # group norms included
        weight.add_(0.1 * torch.randn(weight.shape))
    weights = {}
    for name, value in theirs.state_dict().items():
        kept = re.sub(r"^quantize\.", "", name)
        kept = re.sub(r"\.up\.(\d)\.", lambda level: f".up.{2 - int(level[1])}.", kept)
        if not kept.startswith(("encoder.", "quant_conv.")):
            weights[kept] = value
    ours.load_state_dict(weights)
    codes = torch.randint(40, (2, 3, 3))
    pixels = ours.decode(codes)
    assert pixels.shape == (2, 3, 12, 12)
    assert_close(pixels, theirs.decode(codes.flatten(1)), atol=1e-5, rtol=1e-4)


def test_a_chameleon_carries_the_decoder_under_the_names_of_the_original() -> None:
    toy = image_models.chameleon()
    names = {name for name in toy.state_dict() if ".vqmodel.decoder." in name}
    ends = ("mid.attn_1.q.weight", "up.1.upsample.conv.weight", "up.0.block.1.norm2.bias")
    assert {f"model.vqmodel.decoder.{end}" for end in ends} <= names
    assert not [name for name in names if ".up.0.upsample" in name or ".attn." in name]
    theirs = set(image_models.stock_chameleon().state_dict())
    assert set(toy.state_dict()) - names == theirs


def test_any_grid_is_decoded() -> None:
    decoder = VQGANDecoder(8, 32, (1, 1, 2), 1)
    assert decoder(torch.zeros(1, 8, 3, 5)).shape == (1, 3, 12, 20)
