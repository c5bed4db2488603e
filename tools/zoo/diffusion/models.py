"""The parts of the zoo's text-to-image pipeline: small models of ordinary classes.

`PixArtAlphaPipeline` of a diffusion transformer, a T5 encoder and a convolutional autoencoder.
Pictures of 48 x 48 pixels become 12 x 12 latents of four channels, which the transformer sees as
nine patches, one for each place on the board: so few that a forward costs little more for eight
states than for one, as it does for large models on large machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmspec.zoo.boards import LATENT_CHANNELS, LATENT_SIDE, begin_near_paper
from mmspec.zoo.tokenizer import word_tokenizer

if TYPE_CHECKING:
    from diffusers import (
        AutoencoderTiny,
        DDPMScheduler,
        PixArtAlphaPipeline,
        PixArtTransformer2DModel,
    )
    from transformers import PreTrainedTokenizerFast, T5EncoderModel

PATCH = 4  # latents a side: one patch for each place on the board
PICTURE_WIDTH = 16
TEXT_WIDTH = 128
_FARTHEST = 63  # words between which the text encoder tells distances apart
STEPS = 100  # what pictures are judged at
GUIDANCE = 2.0


@dataclass(frozen=True)
class DenoiserShape:
    """Layers, width and attention heads of a diffusion transformer."""

    layers: int
    width: int
    heads: int


TARGET = DenoiserShape(layers=10, width=128, heads=4)
DRAFTER = DenoiserShape(layers=2, width=128, heads=4)


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token, `</s>` at the end, padding on the right, as T5 has it."""
    return word_tokenizer(
        ("<pad>", "</s>", "<unk>"),
        "$A </s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="right",
    )


def text_encoder(vocabulary: int) -> T5EncoderModel:
    """A T5 encoder of three layers that looks around near every word at first.

    Words of one phrase belong together. Begun without such a leaning, it takes several times as
    long to learn which colour goes with which shape.
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
            relative_attention_max_distance=_FARTHEST + 1,
            is_encoder_decoder=False,
            use_cache=False,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    _lean_near(encoder)
    return encoder


def _lean_near(encoder: T5EncoderModel) -> None:
    """Let attention fall with distance: one head looks back, one ahead, two both ways."""
    parts: Any = encoder
    attention = parts.encoder.block[0].layer[0].SelfAttention
    distance = torch.arange(-_FARTHEST, _FARTHEST + 1)  # of the word looked at, in words
    bucket = attention._relative_position_bucket(
        distance,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    falls = torch.tensor([[0.5, 3.0, 1.0, 0.25], [3.0, 0.5, 1.0, 0.25]])  # behind, ahead; per word
    with torch.no_grad():
        for index in bucket.unique():
            middle = distance[bucket == index].float().mean()
            attention.relative_attention_bias.weight[index] = -falls[int(middle > 0)] * middle.abs()


def autoencoder(scaling: float = 1.0) -> AutoencoderTiny:
    """An autoencoder without normalisation: what it sees of a place does not depend on others."""
    from diffusers import AutoencoderTiny

    coder = AutoencoderTiny(
        encoder_block_out_channels=(PICTURE_WIDTH,) * 3,
        decoder_block_out_channels=(PICTURE_WIDTH,) * 3,
        num_encoder_blocks=(1, 1, 3),
        num_decoder_blocks=(3, 1, 1),
        latent_channels=LATENT_CHANNELS,
        scaling_factor=scaling,
    )
    begin_near_paper(coder, [m for m in coder.modules() if isinstance(m, nn.Conv2d)][-1])
    return coder


def denoiser(shape: DenoiserShape) -> PixArtTransformer2DModel:
    """A diffusion transformer that reads the words of the prompt in every layer."""
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


def pipeline(
    words: PreTrainedTokenizerFast,
    text: T5EncoderModel,
    pictures: AutoencoderTiny,
    transformer: PixArtTransformer2DModel,
) -> PixArtAlphaPipeline:
    """Put the parts together."""
    from diffusers import PixArtAlphaPipeline

    build: Any = PixArtAlphaPipeline
    made: PixArtAlphaPipeline = build(
        tokenizer=words,
        text_encoder=text,
        vae=pictures,
        transformer=transformer,
        scheduler=scheduler(),
    )
    return made
