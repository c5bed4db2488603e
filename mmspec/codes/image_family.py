"""The functions in which image models differ, and conversion of pixels to images."""

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

PromptTokenizer = Callable[
    [Any, Sequence[str], Grid], Mapping[str, Any]
]  # processor, prompts, grid
NativeGenerate = Callable[
    [Mapping[str, Any], Sampling], Tensor
]  # request, settings -> tokens (B, L)


@dataclass(frozen=True, eq=False)
class ImageFamily:
    """The functions in which image models differ for generation.

    `decode` takes code indices, in the order of the codebook. `layout` maps rows and columns to a
    grid and raises ValueError for sizes that the model cannot generate. `request` converts a
    processor's tensors to the engine's inputs, `unconditional` converts those to the unconditional
    prompt's; None if the user must give it. `tokenize_prompts` converts prompts to the inputs of
    `request`, None if the model reads no text; `native_generate` is the model's own generation, if
    it has one. `encode` is the inverse of `decode`, None without an encoder.
    """

    name: str
    codebook: Codebook  # vectors, the token of each code, and the decoder's geometry
    layout: Callable[[int, int], Grid]
    size: tuple[int, int] | None  # default rows, columns
    guidance: float  # the published scale
    decode: Callable[[Tensor], Tensor]  # (B, H, W) -> (B, 3, h, w) in [-1, 1]
    inputs: tuple[str, ...]  # names of the inputs of `request`
    request: Callable[[Mapping[str, Any]], dict[str, Any]]
    unconditional: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    tokenize_prompts: PromptTokenizer | None = None
    native_generate: NativeGenerate | None = None
    encode: Callable[[Tensor], Tensor] | None = None  # (B, 3, h, w) in [-1, 1] -> (B, H, W)


def make_codebook(
    name: str, vectors: Tensor, ids: Tensor, vocabulary: int, metric: Metric = "raw"
) -> Codebook:
    """The codebook (K, d) of a model and the tokens (K,) of its codes.

    Raises ValueError where their numbers differ.
    """
    if len(ids) != len(vectors):
        raise ValueError(
            f"{name} has {len(ids)} image tokens, but its codebook has {len(vectors)} codes; "
            "load a model and a tokenizer that belong together"
        )
    return Codebook(vectors.detach(), ids.to(vectors.device), vocabulary, metric)


def make_encoder(vq: Any, book: Codebook) -> Callable[[Tensor], Tensor]:
    """The `encode` of a VQGAN tokenizer: the nearest codes of its latents."""

    def encode(pixels: Tensor) -> Tensor:  # (B, 3, h, w) -> (B, H, W)
        latents = vq.quant_conv(vq.encoder(pixels))
        return book.nearest(latents.permute(0, 2, 3, 1))

    return encode


def render_partial(pixels: Tensor, known: Tensor) -> list[Image.Image]:
    """Convert pixels (B, 3, h, w) to images, grey in cells (B, H, W) that are not `known`."""
    down, across = (pixels.shape[axis] // known.shape[axis - 1] for axis in (2, 3))
    mask = known.repeat_interleave(down, 1).repeat_interleave(across, 2)
    return to_images(pixels * mask[:, None])


@torch.no_grad()
def to_images(pixels: Tensor) -> list[Image.Image]:  # (B, 3, h, w) in [-1, 1]
    """Convert pixels to images. Raises ValueError for NaN and infinite ones."""
    if not bool(pixels.isfinite().all()):
        raise ValueError(
            "the image decoder returned NaN or infinite pixels; run it in a wider dtype, such as "
            "float32"
        )
    scaled = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(picture) for picture in scaled.permute(0, 2, 3, 1).cpu().numpy()]
