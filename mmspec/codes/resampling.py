"""Pictures of codes at two sizes: a small one drafts a large one (MuLo-SD, Peruzzo et al. 2026).

All take and give tokens: those of the drafter for the small picture, of the target for the large
one. `Repeated` and `ThroughPixels` need no training; `Trained` also says how likely each code is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional

from mmspec.codes.codebook import Codebook
from mmspec.codes.image_family import ImageFamily
from mmspec.models.code_resampler import CodeResampler


class Resampler(Protocol):
    """Between a grid of h x w tokens and one `ratio` times as high and wide."""

    def up(self, tokens: Tensor) -> Tensor: ...  # (B, h, w) -> (B, h * ratio, w * ratio)
    def down(self, tokens: Tensor) -> Tensor: ...  # (B, h * ratio, w * ratio) -> (B, h, w)


@runtime_checkable
class Lawful(Protocol):
    """Likewise, but going up it says a distribution of every token, given those before it."""

    # (B, h, w), (B, H, W), (B,) -> logits (B, ratio, W, V) of the rows below small row `row`; of
    # the large picture only what stands before a token counts for it
    def distribution(self, small: Tensor, large: Tensor, row: Tensor) -> Tensor: ...
    def down(self, tokens: Tensor) -> Tensor: ...  # (B, h * ratio, w * ratio) -> (B, h, w)


@dataclass(frozen=True, eq=False)
class Repeated:
    """In latents: a code becomes ratio x ratio of itself, and back the code nearest to their mean.

    Codes are known by their number, so both models need codebooks of one tokeniser. Going up and
    back changes nothing. Raises ValueError where the codebooks differ in size.
    """

    fine: Codebook  # the target's
    coarse: Codebook  # the drafter's
    ratio: int

    def __post_init__(self) -> None:
        if self.fine.size != self.coarse.size:
            raise ValueError(
                f"the drafter's codebook has {self.coarse.size} codes, the target's "
                f"{self.fine.size}: a code of one is none of the other; choose a draft model with "
                "the target's tokeniser, or upsampler='pixels'"
            )

    def up(self, tokens: Tensor) -> Tensor:
        codes = self.coarse.codes[tokens]
        codes = repeat(codes, "b h w -> b (h r) (w s)", r=self.ratio, s=self.ratio)
        return self.fine.ids[codes]

    def down(self, tokens: Tensor) -> Tensor:
        codes = self.fine.codes[tokens]
        codes = rearrange(codes, "b (h r) (w s) -> b h w (r s)", r=self.ratio, s=self.ratio)
        return self.coarse.ids[self.fine.middle(codes)]


@dataclass(frozen=True, eq=False)
class ThroughPixels:
    """Decode, resize, encode again, each with its own model's tokeniser.

    `mode` is torch's name of the enlargement; shrinking takes means of squares. Raises ValueError
    for a model without an encoder.
    """

    fine: ImageFamily  # the target's
    coarse: ImageFamily  # the drafter's
    ratio: int
    mode: str = "bicubic"

    def __post_init__(self) -> None:
        blind = [one.name for one in (self.fine, self.coarse) if one.encode is None]
        if blind:
            raise ValueError(
                f"{blind[0]} has no encoder to make codes of pictures; give upsampler='latent'"
            )

    def up(self, tokens: Tensor) -> Tensor:
        pixels = self.coarse.decode(self.coarse.codebook.codes[tokens])
        shape = [self.ratio * side for side in pixels.shape[-2:]]
        wide = functional.interpolate(pixels.float(), shape, mode=self.mode).clamp(-1, 1)
        height, width = (self.ratio * side for side in tokens.shape[1:])
        return _coded(self.fine, wide.to(pixels), height, width)

    def down(self, tokens: Tensor) -> Tensor:
        pixels = self.fine.decode(self.fine.codebook.codes[tokens])
        small = functional.avg_pool2d(pixels, self.ratio)
        height, width = (side // self.ratio for side in tokens.shape[1:])
        return _coded(self.coarse, small, height, width)


@dataclass(frozen=True, eq=False)
class Trained:
    """Distributions of codes from a `CodeResampler`; tokens that are no codes are impossible.

    Raises ValueError for a model of another ratio, or one trained between other codebooks.
    """

    fine: Codebook  # the target's
    coarse: Codebook  # the drafter's
    ratio: int
    model: CodeResampler

    def __post_init__(self) -> None:
        if self.model.config.ratio != self.ratio:
            raise ValueError(
                f"the resampler makes pictures {self.model.config.ratio} times larger, the models "
                f"need {self.ratio} times; train one for them, or give another upsampler="
            )
        sides = ((self.fine, self.model.fine_mark), (self.coarse, self.model.coarse_mark))
        for (book, mark), whose in zip(sides, ("target", "drafter"), strict=True):
            if not fits(book, mark):
                raise ValueError(
                    f"the resampler was trained for another codebook of the {whose}, of "
                    f"{len(mark)} codes where this one has {book.size}; train one for these models"
                    ", or give another upsampler="
                )

    def distribution(self, small: Tensor, large: Tensor, row: Tensor) -> Tensor:
        codes = self.fine.codes[large].clamp_min(0)
        logits = self.model.up(self.coarse.codes[small], codes, row)
        shape = (*logits.shape[:-1], self.fine.vocabulary)
        spoken = torch.full(shape, -torch.inf, device=logits.device)
        spoken[..., self.fine.ids] = logits.float()
        return spoken

    def down(self, tokens: Tensor) -> Tensor:
        return self.coarse.ids[self.model.down(self.fine.codes[tokens]).argmax(-1)]


def marked(book: Codebook) -> Tensor:  # -> (K,)
    """What tells a codebook from others: the first component of every vector."""
    return book.vectors[:, 0].detach().float()


def fits(book: Codebook, mark: Tensor) -> bool:
    """Whether a mark is that of a codebook, which may have been loaded in another precision."""
    own = marked(book).cpu()
    slack = 2**-6 * float(own.abs().max())
    return len(own) == len(mark) and torch.allclose(own, mark.float().cpu(), 2**-6, slack)


def _coded(family: ImageFamily, pixels: Tensor, height: int, width: int) -> Tensor:  # -> (B, H, W)
    """The tokens of pictures. Raises ValueError for codes that cover more or fewer pixels."""
    assert family.encode is not None
    codes = family.encode(pixels)
    if codes.shape[1:] != (height, width):
        raise ValueError(
            f"a resized picture is {codes.shape[1]} x {codes.shape[2]} codes of {family.name}, "
            f"not {height} x {width}: its codes cover another number of pixels; give "
            "upsampler='latent'"
        )
    return family.codebook.ids[codes]
