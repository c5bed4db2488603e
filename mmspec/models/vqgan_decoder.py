"""The convolutional decoder of VQGAN: decodes a grid of code vectors to an image.

Esser et al. 2021 ("Taming transformers"). The tokenisers of Chameleon (Gafni et al. 2022; Anole,
Lumina-mGPT), LlamaGen (Sun et al. 2024) and Janus share this architecture: they differ in widths
and in attention at the deepest level. Module names are those of the original; level 0 is the
finest.
"""

from __future__ import annotations

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional


class VQGANDecoder(nn.Module):
    """Latents (B, C, h, w) to pixels (B, 3, h * f, w * f), f = 2 ** (levels - 1)."""

    def __init__(
        self,
        latent_channels: int,
        base_channels: int,
        multipliers: Sequence[int],
        blocks: int,
        attends: bool = False,
        out_channels: int = 3,
    ) -> None:
        super().__init__()
        deepest = len(multipliers) - 1
        width = base_channels * multipliers[deepest]
        self.conv_in = nn.Conv2d(latent_channels, width, 3, padding=1)
        self.mid = nn.ModuleDict(
            {"block_1": ResidualBlock(width, width), "attn_1": Attend(width)}
            | {"block_2": ResidualBlock(width, width)}
        )
        levels = []
        for level in range(deepest, -1, -1):
            inner = base_channels * multipliers[level]
            has_attention = attends and level == deepest
            levels.append(Level(width, inner, blocks + 1, has_attention, upsamples=level > 0))
            width = inner
        self.up = nn.ModuleList(reversed(levels))
        self.norm_out = _norm(width)
        self.conv_out = nn.Conv2d(width, out_channels, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        states = self.conv_in(latents)
        for module in self.mid.values():
            states = module(states)
        for level in reversed(self.up):
            states = level(states)
        pixels: Tensor = self.conv_out(functional.silu(self.norm_out(states)))
        return pixels


class Level(nn.Module):
    """Residual blocks at one resolution, then twice that resolution."""

    def __init__(self, width: int, out: int, blocks: int, attends: bool, upsamples: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            ResidualBlock(width if at == 0 else out, out) for at in range(blocks)
        )
        self.attn = nn.ModuleList(Attend(out) for _ in range(blocks if attends else 0))
        if upsamples:
            self.upsample = nn.ModuleDict({"conv": nn.Conv2d(out, out, 3, padding=1)})
        self.upsamples = upsamples

    def forward(self, states: Tensor) -> Tensor:
        for index, block in enumerate(self.block):
            states = block(states)
            if len(self.attn):
                states = self.attn[index](states)
        if self.upsamples:
            wider = functional.interpolate(states, scale_factor=2.0, mode="nearest")
            states = self.upsample["conv"](wider)
        return states


class ResidualBlock(nn.Module):
    """Two normalised convolutions with a residual connection."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(width), nn.Conv2d(width, out, 3, padding=1)
        self.norm2, self.conv2 = _norm(out), nn.Conv2d(out, out, 3, padding=1)
        if width != out:
            self.nin_shortcut = nn.Conv2d(width, out, 1)
        self.widens = width != out

    def forward(self, states: Tensor) -> Tensor:
        inner = self.conv1(functional.silu(self.norm1(states)))
        inner = self.conv2(functional.silu(self.norm2(inner)))
        shortcut = self.nin_shortcut(states) if self.widens else states
        out: Tensor = shortcut + inner
        return out


class Attend(nn.Module):
    """Single-head attention over all positions of the grid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, states: Tensor) -> Tensor:
        normed = self.norm(states)
        height = states.shape[2]
        query, key, value = (
            rearrange(part(normed), "b c h w -> b 1 (h w) c") for part in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        inner: Tensor = self.proj_out(rearrange(mixed, "b 1 (h w) c -> b c h w", h=height))
        return states + inner


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, width, eps=1e-6)


def decode_codes(codebook: Tensor, codes: Tensor, widen: nn.Module, decoder: nn.Module) -> Tensor:
    """Decode code indices (B, H, W) with a codebook (K, d)."""
    latents = rearrange(functional.embedding(codes, codebook), "b h w d -> b d h w")
    pixels: Tensor = decoder(widen(latents))
    return pixels
