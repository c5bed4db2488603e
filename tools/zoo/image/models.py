"""The bundled autoregressive text-to-image models: small Janus models of the transformers class.

Images of 72 x 72 pixels have 9 x 9 codes, so that every cell of the board has 3 x 3 codes. The
language model is deep and narrow: a forward of sixteen codes costs little more than one of a single
code, as for large models on large machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmspec.zoo.scene_tensors import init_autoencoder
from mmspec.zoo.tokenizer import word_tokenizer

if TYPE_CHECKING:
    from transformers import (
        JanusForConditionalGeneration,
        JanusProcessor,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

PIXELS, SIDE = 72, 9  # side of an image, in pixels and in codes
CODES = 1024
CODE_WIDTH = 8
GUIDANCE = 3.0


@dataclass(frozen=True)
class ImageShape:
    """The language model: layers, width, inner width and heads; `channels` of the autoencoder."""

    layers: int
    width: int
    inner: int
    heads: int
    channels: int = 32


@dataclass(frozen=True)
class PictureFormat:
    """Images: side in pixels and in codes, size of the codebook and width of a code."""

    pixels: int = PIXELS
    side: int = SIDE
    codes: int = CODES
    width: int = CODE_WIDTH

    @property
    def halvings(self) -> int:
        """Number of times that the autoencoder halves the side of an image."""
        return (self.pixels // self.side).bit_length() - 1


FORMAT = PictureFormat()
TARGET = ImageShape(layers=16, width=96, inner=192, heads=3)
DRAFTER = ImageShape(layers=1, width=96, inner=192, heads=3)


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token after `<bos>`, padding on the left, as in Janus."""
    named = {"image_token": "<image>", "boi_token": "<begin_of_image>"}
    return word_tokenizer(
        ("<pad>", "<bos>", "<eos>", "<unk>", "<image>", "<begin_of_image>", "<end_of_image>"),
        "<bos> $A",
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[],
        extra_special_tokens={**named, "eoi_token": "<end_of_image>"},
    )


def processor(size: PictureFormat = FORMAT) -> JanusProcessor:
    """The processor of Janus: `processor(text=..., generation_mode="image")`."""
    from transformers import JanusImageProcessor, JanusProcessor

    build: Any = JanusProcessor
    pixels: Any = JanusImageProcessor
    built: JanusProcessor = build(
        image_processor=pixels(
            size={"height": size.pixels, "width": size.pixels},
            min_size=size.pixels,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ),
        tokenizer=tokenizer(),
        num_image_tokens=size.side**2,
    )
    return built


def janus(
    shape: ImageShape, words: PreTrainedTokenizerFast, size: PictureFormat = FORMAT
) -> JanusForConditionalGeneration:
    """An untrained Janus for generation only: its required vision encoder is minimal."""
    from transformers import (
        GenerationConfig,
        JanusConfig,
        JanusForConditionalGeneration,
        JanusVisionConfig,
        JanusVQVAEConfig,
    )

    ids: Any = words.get_vocab()
    special: dict[str, Any] = {
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    eye = JanusVisionConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=size.pixels,
        patch_size=size.pixels // size.side,
        mlp_ratio=1,
        projection_dim=shape.width,
        depth=1,
        num_image_tokens=size.side**2,
    )
    pictures = JanusVQVAEConfig(
        embed_dim=size.width,
        num_embeddings=size.codes,
        latent_channels=shape.channels,
        base_channels=shape.channels,
        channel_multiplier=[1] * (1 + size.halvings),
        num_res_blocks=0,
        num_hidden_layers=2,
        projection_dim=shape.width,
        image_token_embed_dim=shape.width,
    )
    config = JanusConfig(
        text_config=_text(shape, len(words), special),
        vision_config=eye,
        vq_config=pictures,
        image_token_id=ids["<image>"],
        tie_word_embeddings=True,
    )
    model = JanusForConditionalGeneration(config)
    init_autoencoder(model.model.vqmodel, model.model.vqmodel.decoder.conv_out)
    configure: Any = GenerationConfig
    begin = {"boi_token_id": ids["<begin_of_image>"]}
    # sample from the whole codebook: the default of transformers is top_k=50
    sampled = {"do_sample": True, "top_k": 0}
    model.generation_config = configure(**special, generation_kwargs=begin, **sampled)
    return model


def _text(shape: ImageShape, words: int, special: dict[str, Any]) -> LlamaConfig:
    """The configuration of the language model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=words,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=256,
        # Short sequences: high frequencies distinguish columns and rows, low ones would not.
        rope_parameters={"rope_type": "default", "rope_theta": 200.0},
        initializer_range=0.04,
        **special,
    )
