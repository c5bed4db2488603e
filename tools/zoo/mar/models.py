"""The bundled class-conditional MAR models.

A class is a thing such as "red circle"; its position is up to the model. Images of 48 x 48 pixels
have 12 x 12 latents of four channels, of which 2 x 2 form a token: 6 x 6 tokens of 16 numbers. The
target is deep and narrow: a forward of four images costs little more than one of a single image, as
for large models on large machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.modalities.mar.checkpoints import LABELS
from mmspec.models.mar import MarConfig, MarForImageGeneration
from mmspec.zoo.scene_tensors import LATENT_CHANNELS, LATENT_SIDE

PATCH = 2  # latents a side of a token
SIDE = LATENT_SIDE // PATCH
HEAD_TRAINING_STEPS = 100
STEPS, HEAD_STEPS, GUIDANCE = 36, 16, 3.0  # settings of the evaluation
_EMBEDDING_STD = 0.7


@dataclass(frozen=True)
class MarShape:
    """Layers of encoder and decoder, their width and heads; width and depth of the head."""

    encoder: int
    decoder: int
    width: int
    heads: int
    head_width: int
    head_depth: int
    buffer: int = 4


TARGET = MarShape(encoder=4, decoder=4, width=80, heads=4, head_width=64, head_depth=8)
DRAFTER = MarShape(encoder=1, decoder=1, width=80, heads=4, head_width=64, head_depth=2)


def mar(shape: MarShape, latent_scale: float) -> MarForImageGeneration:
    """An untrained model; `latent_scale` gives latents unit variance."""
    build: Any = MarConfig
    config: MarConfig = build(
        side=SIDE,
        channels=LATENT_CHANNELS,
        patch_size=PATCH,
        num_classes=len(LABELS),
        buffer_size=shape.buffer,
        hidden_size=shape.width,
        num_hidden_layers=shape.encoder,
        num_attention_heads=shape.heads,
        decoder_hidden_size=shape.width,
        decoder_num_hidden_layers=shape.decoder,
        decoder_num_attention_heads=shape.heads,
        mlp_ratio=3.0,
        head_width=shape.head_width,
        head_depth=shape.head_depth,
        base_steps=HEAD_TRAINING_STEPS,
        prediction="velocity",
        latent_scale=latent_scale,
        id2label=dict(enumerate(LABELS)),
        label2id={label: number for number, label in enumerate(LABELS)},
    )
    model = MarForImageGeneration(config)
    _init_weights(model)
    return model


def _init_weights(model: MarForImageGeneration) -> None:
    """Initialise with Glorot weights (Glorot & Bengio 2010), and a head whose output is zero.

    Position embeddings are waves over rows and columns with the scale of the inputs, and keys equal
    queries, so attention prefers neighbouring positions. Without this bias it takes many times as
    long to learn how masked tokens depend on visible ones.
    """
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    head: Any = model.head
    for layer in (*(block.modulation for block in head.blocks), head.modulation, head.output):
        nn.init.zeros_(layer.weight)
    blocks: Any = (*model.encoder, *model.decoder)
    for block in blocks:
        query, key, value = block.qkv.weight.data.chunk(3)
        nn.init.xavier_uniform_(query)
        nn.init.xavier_uniform_(value)
        key.copy_(query)
    nn.init.normal_(model.class_table.weight, std=_EMBEDDING_STD)
    with torch.no_grad():
        for table in (model.encoder_positions, model.decoder_positions, model.head_positions):
            table[:, -(SIDE**2) :] = _position_waves(table.shape[-1])


def _position_waves(width: int) -> Tensor:  # (SIDE^2, width)
    """Sinusoidal embeddings, half of the row and half of the column, with frequencies up to pi."""
    angle = torch.arange(SIDE)[:, None] * torch.linspace(math.pi / SIDE, math.pi, width // 4)
    waves = torch.cat((angle.cos(), angle.sin()), -1)
    rows = waves[:, None].expand(-1, SIDE, -1)
    return _EMBEDDING_STD * torch.cat((rows, rows.transpose(0, 1)), -1).flatten(0, 1)
