"""Image codes at two resolutions: a small image drafts a large one (MuLo-SD, Peruzzo et al. 2026).

Inputs and outputs are tokens: the drafter's for the small image, the target's for the large one.
`LatentResampler` and `PixelResampler` need no training; `TrainedResampler` also gives the
distribution of each code.
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
    """Converts between a grid of h x w tokens and one `ratio` times as high and wide."""

    def up(self, tokens: Tensor) -> Tensor: ...  # (B, h, w) -> (B, h * ratio, w * ratio)
    def down(self, tokens: Tensor) -> Tensor: ...  # (B, h * ratio, w * ratio) -> (B, h, w)


@runtime_checkable
class ConditionalResampler(Protocol):
    """A resampler whose upsampling gives a distribution of every token given those before it."""

    # (B, h, w), (B, H, W), (B,) -> logits (B, ratio, W, V) of the rows below small row `row`, each
    # conditioned on the tokens of the large image before it
    def logits(self, small: Tensor, large: Tensor, row: Tensor) -> Tensor: ...
    def down(self, tokens: Tensor) -> Tensor: ...  # (B, h * ratio, w * ratio) -> (B, h, w)


@dataclass(frozen=True, eq=False)
class LatentResampler:
    """In latents: a code becomes ratio x ratio copies, and back the code nearest to their mean.

    Codes are mapped by index, so both models need codebooks of one tokenizer. Up- and downsampling
    is the identity. Raises ValueError if the codebooks differ in size.
    """

    fine: Codebook  # the target's
    coarse: Codebook  # the drafter's
    ratio: int

    def __post_init__(self) -> None:
        if self.fine.size != self.coarse.size:
            raise ValueError(
                f"the drafter's codebook has {self.coarse.size} codes, the target's "
                f"{self.fine.size}, so codes cannot be mapped; choose a draft model with "
                "the target's tokenizer, or upsampler='pixels'"
            )

    def up(self, tokens: Tensor) -> Tensor:
        codes = self.coarse.codes[tokens]
        codes = repeat(codes, "b h w -> b (h r) (w s)", r=self.ratio, s=self.ratio)
        return self.fine.ids[codes]

    def down(self, tokens: Tensor) -> Tensor:
        codes = self.fine.codes[tokens]
        codes = rearrange(codes, "b (h r) (w s) -> b h w (r s)", r=self.ratio, s=self.ratio)
        return self.coarse.ids[self.fine.nearest_to_mean(codes)]


@dataclass(frozen=True, eq=False)
class PixelResampler:
    """Decode, resize and encode again, each with the model's own tokenizer.

    `mode` is torch's interpolation mode for enlarging; shrinking averages squares. Raises
    ValueError for a model without an encoder.
    """

    fine: ImageFamily  # the target's
    coarse: ImageFamily  # the drafter's
    ratio: int
    mode: str = "bicubic"

    def __post_init__(self) -> None:
        missing = [one.name for one in (self.fine, self.coarse) if one.encode is None]
        if missing:
            raise ValueError(
                f"{missing[0]} has no encoder to turn images into codes; give upsampler='latent'"
            )

    def up(self, tokens: Tensor) -> Tensor:
        pixels = self.coarse.decode(self.coarse.codebook.codes[tokens])
        shape = [self.ratio * side for side in pixels.shape[-2:]]
        wide = functional.interpolate(pixels.float(), shape, mode=self.mode).clamp(-1, 1)
        height, width = (self.ratio * side for side in tokens.shape[1:])
        return _encode_image(self.fine, wide.to(pixels), height, width)

    def down(self, tokens: Tensor) -> Tensor:
        pixels = self.fine.decode(self.fine.codebook.codes[tokens])
        small = functional.avg_pool2d(pixels, self.ratio)
        height, width = (side // self.ratio for side in tokens.shape[1:])
        return _encode_image(self.coarse, small, height, width)


@dataclass(frozen=True, eq=False)
class TrainedResampler:
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
                f"the resampler makes images {self.model.config.ratio} times larger, the models "
                f"need {self.ratio} times; train one for them, or give another upsampler="
            )
        sides = ((self.fine, self.model.fine_mark), (self.coarse, self.model.coarse_mark))
        for (book, mark), owner in zip(sides, ("target", "drafter"), strict=True):
            if not matches_mark(book, mark):
                raise ValueError(
                    f"the resampler was trained for another codebook of the {owner}, of "
                    f"{len(mark)} codes where this one has {book.size}; train one for these models"
                    ", or give another upsampler="
                )

    def logits(self, small: Tensor, large: Tensor, row: Tensor) -> Tensor:
        codes = self.fine.codes[large].clamp_min(0)
        codes_logits = self.model.up(self.coarse.codes[small], codes, row)
        shape = (*codes_logits.shape[:-1], self.fine.vocabulary)
        logits = torch.full(shape, -torch.inf, device=codes_logits.device)
        logits[..., self.fine.ids] = codes_logits.float()
        return logits

    def down(self, tokens: Tensor) -> Tensor:
        return self.coarse.ids[self.model.down(self.fine.codes[tokens]).argmax(-1)]


def compute_mark(book: Codebook) -> Tensor:  # -> (K,)
    """A fingerprint of a codebook: the first component of every vector."""
    return book.vectors[:, 0].detach().float()


def matches_mark(book: Codebook, mark: Tensor) -> bool:
    """Whether a mark is that of a codebook, which may be loaded in another precision."""
    own = compute_mark(book).cpu()
    slack = 2**-6 * float(own.abs().max())
    return len(own) == len(mark) and torch.allclose(own, mark.float().cpu(), 2**-6, slack)


def _encode_image(
    family: ImageFamily, pixels: Tensor, height: int, width: int
) -> Tensor:  # -> (B, H, W)
    """The tokens of images. Raises ValueError for codes that cover more or fewer pixels."""
    assert family.encode is not None
    codes = family.encode(pixels)
    if codes.shape[1:] != (height, width):
        raise ValueError(
            f"a resized picture is {codes.shape[1]} x {codes.shape[2]} codes of {family.name}, "
            f"not {height} x {width}: its codes cover another number of pixels; give "
            "upsampler='latent'"
        )
    return family.codebook.ids[codes]
