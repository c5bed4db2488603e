"""What differs between models that draw with picture tokens, and their pixels as pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec.codes.codebook import Codebook, Metric
from mmspec.codes.grid import Grid
from mmspec.distributions.sampling import Sampling

Words = Callable[[Any, Sequence[str], Grid], Mapping[str, Any]]  # processor, prompts, grid
Peer = Callable[[Mapping[str, Any], Sampling], Tensor]  # request, settings -> tokens (B, L)


@dataclass(frozen=True, eq=False)
class ImageFamily:
    """What differs between image models, as far as drawing is concerned.

    `decode` takes code indices, in the order of the codebook. `layout` lays out rows and columns
    and raises ValueError for what the model cannot draw. `request` turns a processor's tensors into
    the engine's, `unconditional` those into the unconditional prompt's; it is None where only the
    user can give one. `words` turns prompts into what `request` takes, None where the model reads
    none; `peer` is the model's own way to draw, where it has one. `encode` is the way back from
    `decode`, None where the model has no encoder.
    """

    name: str
    codebook: Codebook  # vectors, the token of each code, and the decoder's geometry
    layout: Callable[[int, int], Grid]
    size: tuple[int, int] | None  # rows, columns where the user gives none
    guidance: float  # the published scale
    decode: Callable[[Tensor], Tensor]  # (B, H, W) -> (B, 3, h, w) in [-1, 1]
    inputs: tuple[str, ...]  # names of what `request` reads
    request: Callable[[Mapping[str, Any]], dict[str, Any]]
    unconditional: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    words: Words | None = None
    peer: Peer | None = None
    encode: Callable[[Tensor], Tensor] | None = None  # (B, 3, h, w) in [-1, 1] -> (B, H, W)


def codebook(
    name: str, vectors: Tensor, ids: Tensor, vocabulary: int, metric: Metric = "raw"
) -> Codebook:
    """The codebook (K, d) of a model and the tokens (K,) by which it speaks of the codes.

    Raises ValueError where their numbers differ.
    """
    if len(ids) != len(vectors):
        raise ValueError(
            f"{name} speaks {len(ids)} picture tokens, but its codebook has {len(vectors)} codes; "
            "load a model and a tokeniser that belong together"
        )
    return Codebook(vectors.detach(), ids.to(vectors.device), vocabulary, metric)


def encoder(vq: Any, book: Codebook) -> Callable[[Tensor], Tensor]:
    """The `encode` of a VQGAN tokeniser, and the nearest codes of what it sees."""

    def encode(pixels: Tensor) -> Tensor:  # (B, 3, h, w) -> (B, H, W)
        latents = vq.quant_conv(vq.encoder(pixels))
        return book.nearest(latents.permute(0, 2, 3, 1))

    return encode


def partial_pictures(pixels: Tensor, known: Tensor) -> list[Image.Image]:
    """Pixels (B, 3, h, w) as pictures, grey in the cells (B, H, W) that are not known yet."""
    down, across = (pixels.shape[axis] // known.shape[axis - 1] for axis in (2, 3))
    shown = known.repeat_interleave(down, 1).repeat_interleave(across, 2)
    return pictures(pixels * shown[:, None])


@torch.no_grad()
def pictures(pixels: Tensor) -> list[Image.Image]:  # (B, 3, h, w) in [-1, 1]
    """Pixels as pictures."""
    scaled = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(picture) for picture in scaled.permute(0, 2, 3, 1).cpu().numpy()]
