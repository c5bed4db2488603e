"""MAR: masked autoregression over continuous image tokens (Li et al. 2024), Hugging Face style.

An image is side x side latent tokens of a VAE, generated in random order. An encoder reads the
known tokens after `buffer_size` copies of the class. A decoder reads all positions and returns the
condition of the diffusion head (`mmspec.models.mar_head`) for each:

    known       7  2  5         encoder: class x 64, 2, 5, 7
    positions   0  1  2 ... 8   decoder: class x 64, m, m, 2, m, m, 5, m, 7, m   (m: the mask token)

Attention is bidirectional, so nothing is cached between steps. `mmspec.models.mar_weights` reads
public checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.distributions.noise import KeyedNoise
from mmspec.models.mar_head import PREDICTIONS, DiffusionHead, HeadSampler
from mmspec.targets.continuous.patches import CellQuery, PatchSettings, cell_keys, draw_order
from mmspec.targets.continuous.paths import PathDistribution


class MarConfig(PreTrainedConfig):
    """The defaults are those of MAR-B for 256 x 256 pixels."""

    model_type = "mar"

    side: int = 16  # positions per side
    channels: int = 16  # of the VAE's latents
    patch_size: int = 1  # latents per side of a token
    num_classes: int = 1000
    buffer_size: int = 64
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    decoder_hidden_size: int = 768
    decoder_num_hidden_layers: int = 12
    decoder_num_attention_heads: int = 12
    mlp_ratio: float = 4.0
    head_width: int = 1024
    head_depth: int = 6
    base_steps: int = 1000  # of the head's training
    prediction: str = "noise"  # of the head, or "velocity"; public checkpoints predict noise
    latent_scale: float = 0.2325  # latents here = latents of the VAE times this

    @property
    def cells(self) -> int:
        """L."""
        return self.side**2

    @property
    def token_size(self) -> int:
        """C."""
        return self.channels * self.patch_size**2


class MarPreTrainedModel(PreTrainedModel):
    """Flags that transformers reads."""

    config: MarConfig
    config_class = MarConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _no_split_modules = ["MarBlock"]  # noqa: RUF012


class MarForImageGeneration(MarPreTrainedModel):
    """Masked encoder and decoder with a diffusion head."""

    output_modalities = ("image",)

    def __init__(self, config: MarConfig) -> None:
        super().__init__(config)
        if config.prediction not in PREDICTIONS:
            known = " or ".join(map(repr, PREDICTIONS))
            raise ValueError(
                f"prediction={config.prediction!r} is not known; a head predicts {known}"
            )
        wide, narrow, cells = config.hidden_size, config.decoder_hidden_size, config.cells
        places = config.buffer_size + cells
        self.class_table = nn.Embedding(config.num_classes, wide)
        self.no_class = _parameter(1, wide)
        self.embed = nn.Linear(config.token_size, wide)
        self.encoder_positions = _parameter(1, places, wide)
        self.embed_norm = nn.LayerNorm(wide, eps=1e-6)
        self.encoder = _blocks(
            wide, config.num_attention_heads, config.mlp_ratio, config.num_hidden_layers
        )
        self.encoder_norm = nn.LayerNorm(wide, eps=1e-6)
        self.bridge = nn.Linear(wide, narrow)
        self.mask_token = _parameter(1, 1, narrow)
        self.decoder_positions = _parameter(1, places, narrow)
        self.decoder = _blocks(
            narrow,
            config.decoder_num_attention_heads,
            config.mlp_ratio,
            config.decoder_num_hidden_layers,
        )
        self.decoder_norm = nn.LayerNorm(narrow, eps=1e-6)
        self.head_positions = _parameter(1, cells, narrow)
        self.head = DiffusionHead(config.token_size, narrow, config.head_width, config.head_depth)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, latents: Tensor, shown: Tensor, classes: Tensor) -> Tensor:
        """Conditions (R, L, D) of all positions.

        Reads the `latents` (R, L, C) that are `shown` (R, L) bool; class `num_classes` in `classes`
        (R,) means none. Rows may have different numbers of known positions.
        """
        buffer, counts = self.config.buffer_size, shown.sum(-1)
        place = shown.int().argsort(dim=-1, descending=True, stable=True)[:, : int(counts.max())]
        visible = torch.arange(place.shape[1], device=place.device) < counts[:, None]
        mask = None
        if not bool(visible.all()):
            front = visible.new_ones(len(visible), buffer)
            mask = torch.cat((front, visible), 1)[:, None, None]
        x = self._embed_inputs(latents, classes)
        index = place[..., None] + buffer
        x = torch.cat((x[:, :buffer], x.gather(1, index.expand(-1, -1, x.shape[-1]))), 1)
        for block in self.encoder:
            x = block(x, mask)
        x = self.bridge(self.encoder_norm(x))
        known = torch.where(visible[..., None], x[:, buffer:], self.mask_token)
        places = self.mask_token.expand(len(x), self.config.cells, -1)
        places = places.scatter(1, place[..., None].expand(-1, -1, x.shape[-1]), known)
        x = torch.cat((x[:, :buffer], places), 1) + self.decoder_positions
        for block in self.decoder:
            x = block(x, None)
        conditions: Tensor = self.decoder_norm(x)[:, buffer:] + self.head_positions
        return conditions

    def distribution(
        self, sampler: HeadSampler, query: CellQuery, classes: Tensor
    ) -> PathDistribution:
        """Distribution of the paths of queried cells, in images of `classes` (R,); batch (R, K).

        With guidance every row is read twice, with and without its class.
        """
        plan, count = sampler.plan, len(query.latents)
        branches = 1 if plan.guidance == 1 else 2
        labels = classes
        if branches == 2:
            labels = torch.cat((classes, torch.full_like(classes, self.config.num_classes)))
        latents = query.latents.repeat(branches, 1, 1).to(self.dtype)
        seen = self(latents, query.visible.repeat(branches, 1), labels)
        index = query.cells.repeat(branches, 1)[..., None].expand(-1, -1, seen.shape[-1])
        condition = seen.gather(1, index).unflatten(0, (branches, count)).movedim(0, 2)
        scale = plan.scales(query.reach, self.config.cells)[:, None].expand_as(query.cells)
        return PathDistribution(sampler, condition, scale, query.real)

    def make_sampler(self, plan: PatchSettings) -> HeadSampler:
        """Return the head with the sampler of a plan."""
        return HeadSampler(self.head, self.config.base_steps, plan, self.config.prediction)

    @torch.no_grad()
    def sample(
        self,
        classes: Tensor,
        plan: PatchSettings | None = None,
        seed: int = 0,
        row_ids: Sequence[int] | None = None,
    ) -> Tensor:
        """Plain decoding: latents (B, channels, h, w) of images of `classes` (B,).

        Noise and order depend on (seed, row id, position) alone, see `mmspec.distributions.noise`.
        """
        plan, classes = plan or PatchSettings(), classes.to(self.device)
        batch, cells = len(classes), self.config.cells
        noise = KeyedNoise.from_seed(seed, batch, self.device, row_ids)
        turns, sampler = draw_order(noise, cells), self.make_sampler(plan)
        latents = torch.zeros(batch, cells, self.config.token_size, device=self.device)
        shown = torch.zeros(batch, cells, dtype=torch.bool, device=self.device)
        rows = torch.arange(batch, device=self.device)
        for begin, end in plan.spans(cells):
            now = turns[:, begin:end]
            reach = torch.full((batch,), end, device=self.device)
            real = torch.ones_like(now, dtype=torch.bool)
            distribution = self.distribution(
                sampler, CellQuery(latents, shown, now, real, rows, reach), classes
            )
            tokens = distribution.sample(cell_keys(noise, now))[:, :, -1]
            latents = latents.scatter(1, now[..., None].expand_as(tokens), tokens)
            shown = shown.scatter(1, now, True)
        return self.to_vae_latents(latents)

    def to_vae_latents(self, latents: Tensor) -> Tensor:  # (B, L, C) -> (B, channels, h, w)
        """Rearrange tokens to the layout of the VAE."""
        side, patch = self.config.side, self.config.patch_size
        grid: Tensor = latents.unflatten(-1, (-1, patch, patch))
        grid = grid.unflatten(1, (side, side))
        return grid.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)

    def _embed_inputs(self, latents: Tensor, classes: Tensor) -> Tensor:  # -> (R, buffer + L, D)
        config, none = self.config, classes >= self.config.num_classes
        known = self.class_table(classes.clamp_max(config.num_classes - 1))
        front = torch.where(none[:, None], self.no_class, known)
        x = torch.cat(
            (front[:, None].expand(-1, config.buffer_size, -1), self.embed(latents)), dim=1
        )
        embedded: Tensor = self.embed_norm(x + self.encoder_positions)
        return embedded


class MarBlock(nn.Module):
    """A pre-norm transformer block with fused projections."""

    def __init__(self, width: int, heads: int, ratio: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} is not divisible by {heads} heads")
        inner = int(width * ratio)
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # (R, P, D), (R, 1, 1, P) bool
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.transpose(1, 3).unbind(2)  # (R, heads, P, d)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        output: Tensor = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return output


def _blocks(width: int, heads: int, ratio: float, count: int) -> nn.ModuleList:
    return nn.ModuleList(MarBlock(width, heads, ratio) for _ in range(count))


def _parameter(*shape: int) -> Any:
    return nn.Parameter(0.02 * torch.randn(*shape))
