"""The zoo's images of continuous tokens: small MAR models behind a class, and its autoencoder.

A class is what to draw, such as "red circle"; where it goes is up to the model. Pictures of 48 x 48
pixels become 12 x 12 latents of four channels, of which 2 x 2 are a token: 6 x 6 tokens of 16
numbers. The target is deep and narrow: a forward of it costs little more for four pictures than for
one, as it does for large models on large machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.modalities.mar.held_out import LABELS
from mmspec.models.mar import MarConfig, MarForImageGeneration
from mmspec.zoo.boards import LATENT_CHANNELS, LATENT_SIDE

PATCH = 2  # latents a side of a token
SIDE = LATENT_SIDE // PATCH
HEAD_TRAINING_STEPS = 100
STEPS, HEAD_STEPS, GUIDANCE = 36, 16, 3.0  # what pictures are judged at
_LOUD = 0.7  # std of what is looked up


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
    _begin(model)
    return model


def _begin(model: MarForImageGeneration) -> None:
    """Begin with signals of even size (Glorot & Bengio 2010), and a head that says nothing.

    Places begin as waves over rows and columns, as large as what is seen there, and attention looks
    for what is like the place that asks, so for its neighbours. Begun without such a leaning, it
    takes many times as long to learn what the tokens shown say about those that are not.
    """
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    head: Any = model.head
    for layer in (*(block.modulation for block in head.blocks), head.modulation, head.output):
        nn.init.zeros_(layer.weight)
    blocks: Any = (*model.encoder, *model.decoder)
    for block in blocks:
        asked, given, told = block.qkv.weight.data.chunk(3)
        nn.init.xavier_uniform_(asked)
        nn.init.xavier_uniform_(told)
        given.copy_(asked)
    nn.init.normal_(model.class_table.weight, std=_LOUD)
    with torch.no_grad():
        for table in (model.encoder_positions, model.decoder_positions, model.head_positions):
            table[:, -(SIDE**2) :] = _waves(table.shape[-1])


def _waves(width: int) -> Tensor:  # (SIDE^2, width)
    """Half of the numbers wave with the row, half with the column, at frequencies up to pi."""
    angle = torch.arange(SIDE)[:, None] * torch.linspace(math.pi / SIDE, math.pi, width // 4)
    waves = torch.cat((angle.cos(), angle.sin()), -1)
    rows = waves[:, None].expand(-1, SIDE, -1)
    return _LOUD * torch.cat((rows, rows.transpose(0, 1)), -1).flatten(0, 1)
