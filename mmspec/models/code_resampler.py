"""Trained up- and down-sampler between the codes of a small picture and those of a large one.

Peruzzo et al. 2026 (MuLo-SD) train both through pixels. This one is trained on the codes: going up
it says a distribution of every large code, which is what exact verification can make the most of. A
large code is told from the small codes around its place and the large codes before it, near by:

    small codes, no row below its own       large codes: those before it, `reach` around

        o o o                                   . . . . .
        o x o                                   . . . . .
        - - -                                   . . x - -

Both ways are small networks that read one place at a time, all places at once. A picture's edge
reads as a code of its own.
"""

from __future__ import annotations

from pathlib import Path

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from mmspec.models.reading import read

FOLDER = "resampler"  # where it lies within the folder of the draft model


class CodeResamplerConfig(PretrainedConfig):
    """`ratio` large codes a side of a small one; `fine` and `coarse` codes in the two codebooks."""

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
    """Codes of one size to distributions of codes of the other.

    `fine_mark` and `coarse_mark` are the first components of both codebooks' vectors: they tell
    codebooks apart, in whatever precision those are loaded.
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
        self.spot = nn.Embedding(cells, config.small_width)  # where in its small cell
        self.enter = nn.Linear(near, width)
        self.think = nn.Linear(width, width)
        self.say = nn.Linear(width, config.fine)
        self.gather = nn.Linear(cells * config.large_width, config.inner_down)
        self.name = nn.Linear(config.inner_down, config.coarse)
        self.register_buffer("fine_mark", torch.zeros(config.fine))
        self.register_buffer("coarse_mark", torch.zeros(config.coarse))
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """As torch begins them: the small numbers that suit deep models would learn slowly here."""

    def up(self, small: Tensor, large: Tensor, row: Tensor) -> Tensor:
        """Logits (B, ratio, W, fine) of the codes below row `row` (B,) of `small` (B, h, w).

        Of `large` (B, H, W) only what stands before each code counts.
        """
        return self.told(self.near(small, large, row))

    def told(self, near: Tensor) -> Tensor:  # (..., F) -> (..., fine)
        """Logits of codes by what is near them."""
        near = functional.dropout(near, self.config.dropout, self.training)
        inner = functional.silu(self.enter(near))
        logits: Tensor = self.say(inner + functional.silu(self.think(inner)))
        return logits

    def near(self, small: Tensor, large: Tensor, row: Tensor) -> Tensor:  # -> (B, ratio, W, F)
        """What is near the codes that `up` speaks of."""
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
        """Logits of the small codes of a large picture."""
        ratio = self.config.ratio
        squares = rearrange(self.large(large), "b (h r) (w c) d -> b h w (r c d)", r=ratio, c=ratio)
        logits: Tensor = self.name(functional.silu(self.gather(squares)))
        return logits


def _rows(grid: Tensor, first: Tensor, count: int) -> Tensor:  # (B, H, W), (B,) -> (B, count, W)
    """Some rows of each grid, from `first` on."""
    rows = first[:, None] + torch.arange(count, device=grid.device)
    return grid[torch.arange(len(grid), device=grid.device)[:, None], rows]


def _before(reach: int) -> list[tuple[int, int]]:
    """Places near one that come before it, as rows up and columns aside."""
    above = [(up, aside) for up in range(reach, 0, -1) for aside in range(-reach, reach + 1)]
    return [*above, *((0, aside) for aside in range(-reach, 0))]


def load_resampler(folder: str | Path) -> CodeResampler:
    """Read a resampler from a folder, in float32 or as it was saved.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: CodeResampler = read(CodeResampler, folder, "resampler")
    return loaded
