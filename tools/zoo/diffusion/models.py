"""The parts of the bundled text-to-image pipeline: small models of diffusers and transformers.

`PixArtAlphaPipeline` with a diffusion transformer, a T5 encoder and a convolutional autoencoder.
Images of 48 x 48 pixels have 12 x 12 latents of four channels, split into nine patches, one per
cell of the board: so few that a forward of eight states costs little more than one of a single
state, as for large models on large machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmspec.zoo.scene_tensors import LATENT_CHANNELS, LATENT_SIDE, init_autoencoder
from mmspec.zoo.tokenizer import word_tokenizer

if TYPE_CHECKING:
    from diffusers import (
        AutoencoderTiny,
        DDPMScheduler,
        DPMSolverMultistepScheduler,
        PixArtAlphaPipeline,
        PixArtTransformer2DModel,
    )
    from transformers import PreTrainedTokenizerFast, T5EncoderModel

PATCH = 4  # latents per side: one patch per cell of the board
PICTURE_WIDTH = 16
TEXT_WIDTH = 128
_BLOCKS = "transformer_blocks."
_MAX_DISTANCE = 63  # maximal relative position of the text encoder
STEPS = 100  # in the evaluation
GUIDANCE = 2.0


@dataclass(frozen=True)
class DenoiserShape:
    """Layers, width and attention heads of a diffusion transformer."""

    layers: int
    width: int
    heads: int


TARGET = DenoiserShape(layers=10, width=128, heads=4)
TEXTURED = DenoiserShape(layers=6, width=128, heads=4)
DRAFTER = DenoiserShape(layers=2, width=128, heads=4)


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token, `</s>` at the end, padding on the right, as in T5."""
    return word_tokenizer(
        ("<pad>", "</s>", "<unk>"),
        "$A </s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="right",
    )


def text_encoder(vocabulary: int) -> T5EncoderModel:
    """A T5 encoder of three layers, initialised to attend to nearby words.

    Without this bias it takes several times as long to learn which colour belongs to which shape.
    """
    from transformers import T5Config, T5EncoderModel

    encoder = T5EncoderModel(
        T5Config(
            vocab_size=vocabulary,
            d_model=TEXT_WIDTH,
            d_kv=32,
            d_ff=2 * TEXT_WIDTH,
            num_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            relative_attention_num_buckets=32,
            relative_attention_max_distance=_MAX_DISTANCE + 1,
            is_encoder_decoder=False,
            use_cache=False,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    _init_distance_bias(encoder)
    return encoder


def _init_distance_bias(encoder: T5EncoderModel) -> None:
    """Attention decreases with distance: one head attends backwards, one forwards, two both."""
    parts: Any = encoder
    attention = parts.encoder.block[0].layer[0].SelfAttention
    distance = torch.arange(-_MAX_DISTANCE, _MAX_DISTANCE + 1)  # relative position of the key
    bucket = attention._relative_position_bucket(
        distance,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    falls = torch.tensor(
        [[0.5, 3.0, 1.0, 0.25], [3.0, 0.5, 1.0, 0.25]]
    )  # backwards, forwards; per word
    with torch.no_grad():
        for index in bucket.unique():
            middle = distance[bucket == index].float().mean()
            attention.relative_attention_bias.weight[index] = -falls[int(middle > 0)] * middle.abs()


def autoencoder(scaling: float = 1.0) -> AutoencoderTiny:
    """An autoencoder without normalisation, so that latents depend on nearby pixels only."""
    from diffusers import AutoencoderTiny

    coder = AutoencoderTiny(
        encoder_block_out_channels=(PICTURE_WIDTH,) * 3,
        decoder_block_out_channels=(PICTURE_WIDTH,) * 3,
        num_encoder_blocks=(1, 1, 3),
        num_decoder_blocks=(3, 1, 1),
        latent_channels=LATENT_CHANNELS,
        scaling_factor=scaling,
    )
    init_autoencoder(coder, [m for m in coder.modules() if isinstance(m, nn.Conv2d)][-1])
    return coder


def denoiser(shape: DenoiserShape) -> PixArtTransformer2DModel:
    """A diffusion transformer with cross-attention to the prompt in every layer."""
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        num_attention_heads=shape.heads,
        attention_head_dim=shape.width // shape.heads,
        num_layers=shape.layers,
        cross_attention_dim=shape.width,
        caption_channels=TEXT_WIDTH,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        sample_size=LATENT_SIDE,
        patch_size=PATCH,
        norm_num_groups=1,
        interpolation_scale=1,
        use_additional_conditions=False,
    )


def prune_layers(base: PixArtTransformer2DModel, shape: DenoiserShape) -> PixArtTransformer2DModel:
    """A denoiser of fewer layers with the weights of `base`: evenly spaced, first and last kept."""
    last, count = len(base.transformer_blocks) - 1, shape.layers - 1
    kept = [round(layer * last / count) for layer in range(shape.layers)]
    made, weights = denoiser(shape), dict[str, Any]()
    for name, weight in base.state_dict().items():
        if not name.startswith(_BLOCKS):
            weights[name] = weight
            continue
        layer, part = name.removeprefix(_BLOCKS).split(".", 1)
        if int(layer) in kept:
            weights[f"{_BLOCKS}{kept.index(int(layer))}.{part}"] = weight
    made.load_state_dict(weights)
    return made


def scheduler() -> DDPMScheduler:
    """A cosine schedule of a thousand steps; the model predicts velocity."""
    from diffusers import DDPMScheduler

    return DDPMScheduler(
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        variance_type="fixed_small",
        timestep_spacing="trailing",
        clip_sample=False,
    )


def solver(**settings: Any) -> DPMSolverMultistepScheduler:
    """DPM-Solver++ on the same schedule, as PixArt is published with: few steps, without noise."""
    from diffusers import DPMSolverMultistepScheduler

    return DPMSolverMultistepScheduler.from_config(scheduler().config, **settings)


def pipeline(
    words: PreTrainedTokenizerFast,
    text: T5EncoderModel,
    pictures: AutoencoderTiny,
    transformer: PixArtTransformer2DModel,
    is_deterministic: bool = False,
) -> PixArtAlphaPipeline:
    """Assemble the pipeline, with a sampler that adds noise or a deterministic one."""
    from diffusers import PixArtAlphaPipeline

    build: Any = PixArtAlphaPipeline
    made: PixArtAlphaPipeline = build(
        tokenizer=words,
        text_encoder=text,
        vae=pictures,
        transformer=transformer,
        scheduler=solver() if is_deterministic else scheduler(),
    )
    return made
