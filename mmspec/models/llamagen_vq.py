"""Decoder of LlamaGen's image tokeniser (VQ-16; Sun et al. 2024)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.models.vqgan_decoder import VQGANDecoder, decode_codes


class LlamaGenVQConfig(PreTrainedConfig):
    """The defaults are those of VQ-16, which downsamples by 16."""

    model_type = "llamagen_vq"

    num_embeddings: int = 16384
    embed_dim: int = 8
    latent_channels: int = 256
    base_channels: int = 128
    channel_multiplier: tuple[int, ...] | list[int] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2


class LlamaGenVQ(PreTrainedModel):
    """Decodes codes to pixels. Code vectors are normalised to length 1 at look-up."""

    config: LlamaGenVQConfig
    config_class = LlamaGenVQConfig
    _supports_sdpa = True

    def __init__(self, config: LlamaGenVQConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.num_embeddings, config.embed_dim)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.latent_channels, 1)
        self.decoder = VQGANDecoder(
            config.latent_channels,
            config.base_channels,
            config.channel_multiplier,
            config.num_res_blocks,
            attends=True,
        )
        self.post_init()  # type: ignore[no-untyped-call]

    @property
    def codebook(self) -> Tensor:  # (K, d)
        """The normalised code vectors that the decoder reads."""
        return functional.normalize(self.embedding.weight, dim=-1)

    def decode(self, codes: Tensor) -> Tensor:  # (B, H, W) -> (B, 3, h, w) in about [-1, 1]
        return decode_codes(self.codebook, codes, self.post_quant_conv, self.decoder)

    def forward(self, codes: Tensor, **_: Any) -> Tensor:
        return self.decode(codes)
