"""Resampling between two sizes: identities where they must hold, and the codes of tokenizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mmspec.codes.codebook import Codebook, Metric
from mmspec.codes.grid import Grid
from mmspec.codes.image_family import ImageFamily
from mmspec.codes.resampling import LatentResampler, PixelResampler
from mmspec.modalities.image import families as image
from tests.toys import image_models

SIZE = 12


def book(offset: int = 0, metric: Metric = "raw") -> Codebook:
    rows = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0))
    return Codebook.from_offset(rows.tanh(), offset, SIZE + offset, metric)


def patches(offset: int = 0, side: int = 4) -> ImageFamily:
    """A tokenizer in closed form: a code is a square of one colour."""
    codes = book(offset)

    def decode(ids: Tensor) -> Tensor:
        colours = codes.vectors[ids].permute(0, 3, 1, 2)
        return colours.repeat_interleave(side, 2).repeat_interleave(side, 3)

    def encode(pixels: Tensor) -> Tensor:
        return codes.nearest(functional.avg_pool2d(pixels, side).permute(0, 2, 3, 1))

    def layout(height: int, width: int) -> Grid:
        return Grid(height, width, (offset, offset + SIZE))

    return ImageFamily("Patches", codes, layout, None, 1.0, decode, (), dict, encode=encode)


def tokens(*shape: int, offset: int = 0) -> Tensor:
    return torch.randint(SIZE, shape, generator=torch.Generator().manual_seed(3)) + offset


@pytest.mark.parametrize("metric", ["raw", "normalised"])
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_up_and_back_changes_nothing(ratio: int, metric: Metric) -> None:
    sampler = LatentResampler(book(5, metric), book(2, metric), ratio)
    small = tokens(2, 3, 4, offset=2)
    large = sampler.up(small)
    assert large.shape == (2, 3 * ratio, 4 * ratio)
    assert torch.equal(large[:, ::ratio, ::ratio], small + 3)
    assert torch.equal(large[:, ratio - 1 :: ratio, ratio - 1 :: ratio], small + 3)
    assert torch.equal(sampler.down(large), small)


def test_down_takes_the_code_in_the_middle() -> None:
    """On a line: the mean of 0, 0, 1 and 3 is 1, of 3, 3, 3 and 2 it is 2.75."""
    line = Codebook.from_offset(torch.arange(4.0)[:, None])
    large = torch.tensor([[[0, 0, 3, 3], [1, 3, 3, 2]]])
    assert LatentResampler(line, line, 2).down(large).tolist() == [[[1, 3]]]
    assert line.nearest(torch.tensor([[0.4], [0.5], [9.0]])).tolist() == [0, 0, 3]


def test_nearest_codes_are_those_of_a_search() -> None:
    codes, points = book(metric="normalised"), torch.randn(40, 3)
    likeness = functional.normalize(points, dim=-1) @ functional.normalize(codes.vectors, dim=-1).T
    assert torch.equal(codes.nearest(points.view(5, 8, 3)).flatten(), likeness.argmax(-1))
    assert torch.equal(codes.nearest(7 * codes.vectors), torch.arange(SIZE))


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_through_pixels_of_one_colour_it_is_repetition(ratio: int) -> None:
    fine, coarse = patches(5), patches(2)
    sampler = PixelResampler(fine, coarse, ratio, "nearest-exact")
    latent = LatentResampler(fine.codebook, coarse.codebook, ratio)
    small = tokens(2, 3, 4, offset=2)
    assert torch.equal(sampler.up(small), latent.up(small))
    assert torch.equal(sampler.down(sampler.up(small)), small)
    flat = torch.full((1, 3, 4), 6)
    smooth = PixelResampler(fine, coarse, ratio)
    assert torch.equal(smooth.up(flat), latent.up(flat))


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="has 4 codes, the target's 12"):
        LatentResampler(book(), Codebook.from_offset(torch.randn(4, 3)), 2)
    with pytest.raises(ValueError, match=r"has no encoder .* upsampler='latent'"):
        PixelResampler(patches(), replace(patches(), encode=None), 2)
    odd = PixelResampler(patches(side=2), patches(side=4), 2)
    with pytest.raises(ValueError, match="is 12 x 16 codes of Patches, not 6 x 8"):
        odd.up(tokens(1, 3, 4))


@pytest.mark.parametrize("family", ["janus", "chameleon", "emu3"])
@torch.no_grad()
def test_models_encode_with_their_own_tokeniser(family: str) -> None:
    model: Any = image_models.PAINTERS[family]()
    image_family, vq = image.image_family(model), model.model.vqmodel
    assert image_family.encode is not None
    side = image_models.SIDE
    codes = torch.randint(image_models.CODES, (2, side, side))
    pixels = image_family.decode(codes).clamp(-1, 1)
    found = image_family.encode(pixels)
    assert found.shape == codes.shape
    assert len(found.unique()) > 1
    if family == "emu3":
        own = vq.encode(pixels, torch.tensor([pixels.shape[-2:]] * 2)).image_tokens
        assert torch.equal(found, torch.stack(own))
    elif family == "chameleon":
        assert torch.equal(found.flatten(), vq.encode(pixels).image_tokens)
    else:  # codes are looked up with length 1, so they are compared with length 1
        latents = functional.normalize(vq.quant_conv(vq.encoder(pixels)), dim=1)
        unit = functional.normalize(vq.quantize.embedding.weight, dim=-1)
        likeness = torch.einsum("bdhw, kd -> bhwk", latents, unit)
        assert torch.equal(found, likeness.argmax(-1))
