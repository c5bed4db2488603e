"""Trained up- and down-sampler between the image tokens of a small and a large image.

Peruzzo et al. 2026 (MuLo-SD) train both through pixels. This one is trained on codes: upsampling
predicts a distribution of every large code, as exact verification needs. It is conditioned on the
neighbouring small codes and the preceding large codes nearby:

    small codes, no row below its own       large codes before it, within `reach`

        o o o                                   . . . . .
        o x o                                   . . . . .
        - - -                                   . . x - -

Both directions are small networks applied to all positions in parallel. Positions outside the image
have a code of their own.
"""

from __future__ import annotations

from pathlib import Path

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from mmspec.models.loading import load_model

FOLDER = "resampler"  # subfolder of the draft model's folder


class CodeResamplerConfig(PretrainedConfig):
    """`ratio` large codes per side of a small one; codebooks of `fine` and `coarse` codes."""

    model_type = "code_resampler"

    ratio: int = 2
    fine: int = 512
    coarse: int = 512
    reach: int = 2
    small_width: int = 32
    large_width: int = 16
    inner: int = 192
    inner_down: int = 64
    dropout: float = 0.1


class CodeResampler(PreTrainedModel):
    """Maps codes of one image size to distributions of codes of the other.

    `fine_mark` and `coarse_mark` are the first components of both codebooks' vectors: they identify
    codebooks in any precision.
    """

    config: CodeResamplerConfig
    config_class = CodeResamplerConfig
    base_model_prefix = "model"
    fine_mark: Tensor  # (fine,)
    coarse_mark: Tensor  # (coarse,)

    def __init__(self, config: CodeResamplerConfig) -> None:
        super().__init__(config)
        cells, width = config.ratio**2, config.inner
        self.small = nn.Embedding(config.coarse + 1, config.small_width)
        self.large = nn.Embedding(config.fine + 1, config.large_width)
        near = 7 * config.small_width + len(_before(config.reach)) * config.large_width
        self.spot = nn.Embedding(cells, config.small_width)  # position within the small cell
        self.enter = nn.Linear(near, width)
        self.think = nn.Linear(width, width)
        self.say = nn.Linear(width, config.fine)
        self.gather = nn.Linear(cells * config.large_width, config.inner_down)
        self.name = nn.Linear(config.inner_down, config.coarse)
        self.register_buffer("fine_mark", torch.zeros(config.fine))
        self.register_buffer("coarse_mark", torch.zeros(config.coarse))
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """Keep torch's initialisation: the smaller one for deep models trains slowly here."""

    def up(self, small: Tensor, large: Tensor, row: Tensor) -> Tensor:
        """Logits (B, ratio, W, fine) of the codes below row `row` (B,) of `small` (B, h, w).

        Of `large` (B, H, W) only codes before each one are read.
        """
        return self.predict(self.gather_context(small, large, row))

    def predict(self, context: Tensor) -> Tensor:  # (..., F) -> (..., fine)
        """Logits of codes from their contexts."""
        context = functional.dropout(context, self.config.dropout, self.training)
        inner = functional.silu(self.enter(context))
        logits: Tensor = self.say(inner + functional.silu(self.think(inner)))
        return logits

    def gather_context(
        self, small: Tensor, large: Tensor, row: Tensor
    ) -> Tensor:  # -> (B, ratio, W, F)
        """Gather the contexts of the codes that `up` predicts."""
        ratio, reach, width = self.config.ratio, self.config.reach, large.shape[2]
        framed = functional.pad(small, (1, 1, 1, 0), value=self.config.coarse)
        around = self.small(_rows(framed, row, 2)).unfold(2, 3, 1)  # (B, 2, w, d, 3)
        below = repeat(around, "b y w d x -> b r (w c) (y x d)", r=ratio, c=ratio)
        framed = functional.pad(large, (reach, reach, reach, 0), value=self.config.fine)
        seen = self.large(_rows(framed, row * ratio, reach + ratio))
        parts = [
            seen[:, reach - up : reach - up + ratio, reach + aside : reach + aside + width]
            for up, aside in _before(reach)
        ]
        spot = rearrange(self.spot.weight, "(r c) d -> r c d", r=ratio)
        within = repeat(spot, "r c d -> b r (w c) d", b=len(small), w=small.shape[2])
        return torch.cat([below, within, *parts], -1)

    def down(self, large: Tensor) -> Tensor:  # (B, H, W) -> (B, h, w, coarse)
        """Logits of the small codes of a large image."""
        ratio = self.config.ratio
        squares = rearrange(self.large(large), "b (h r) (w c) d -> b h w (r c d)", r=ratio, c=ratio)
        logits: Tensor = self.name(functional.silu(self.gather(squares)))
        return logits


def _rows(grid: Tensor, first: Tensor, count: int) -> Tensor:  # (B, H, W), (B,) -> (B, count, W)
    """Gather `count` rows of each grid, starting at `first`."""
    rows = first[:, None] + torch.arange(count, device=grid.device)
    return grid[torch.arange(len(grid), device=grid.device)[:, None], rows]


def _before(reach: int) -> list[tuple[int, int]]:
    """Offsets (rows up, columns right) of preceding positions within `reach`."""
    above = [(up, aside) for up in range(reach, 0, -1) for aside in range(-reach, reach + 1)]
    return [*above, *((0, aside) for aside in range(-reach, 0))]


def load_resampler(folder: str | Path) -> CodeResampler:
    """Load a resampler from a folder, in the saved dtype.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: CodeResampler = load_model(CodeResampler, folder, "resampler")
    return loaded
