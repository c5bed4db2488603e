"""Emu3 generates with its language model head: image tokens are part of the text vocabulary.

Wang et al. 2024. A row of codes ends with EOL; the last row is followed by end-of-frame,
end-of-image and end-of-sequence. The prompt is the processor's (`return_for_image_generation=True`)
and contains height and width, so the grid must have that size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.codes.image_family import ImageFamily, make_codebook
from mmspec.modalities.image.generation import token_request, tokenize_prompts
from mmspec.targets.readers.reader import Family

ENDS = ("<|extra_201|>", "<|image end|>")  # of the frame, of the image


def image_family(model: Any) -> ImageFamily:
    """The image family of an `Emu3ForConditionalGeneration`.

    Raises ValueError where vocabulary and codebook differ.
    """
    name, vocabulary = type(model).__name__, model.config.text_config.vocab_size
    mapping, vq = model.vocabulary_mapping, model.model.vqmodel
    codes = torch.tensor([token for _, token in sorted(mapping.img2bpe.items())])
    ends = [mapping.vocab_map.get(name) for name in ENDS] + [model.config.text_config.eos_token_id]
    footer = tuple(end for end in ends if isinstance(end, int))

    def layout(height: int, width: int) -> Grid:
        return Grid(height, width, codes, separator=mapping.eol_token_id, footer=footer)

    def encode(pixels: Tensor) -> Tensor:
        sizes = torch.tensor([pixels.shape[-2:]] * len(pixels))
        return torch.stack(vq.encode(pixels, sizes).image_tokens)

    return ImageFamily(
        name=name,
        codebook=make_codebook(name, vq.quantize.embedding.weight, codes, vocabulary),
        layout=layout,
        size=None,
        guidance=3.0,
        decode=vq.decode,
        inputs=("input_ids", "attention_mask"),
        request=partial(token_request, model, vocabulary),
        tokenize_prompts=words,
        encode=encode,
    )


def words(processor: Any, texts: Sequence[str], grid: Grid) -> Mapping[str, Any]:
    """Prompts followed by the image size and begin-of-image."""
    pixels = processor.downsample_ratio**2 * grid.cells
    size = {"ratio": f"{grid.width}:{grid.height}", "image_area": pixels}
    return tokenize_prompts(processor, texts, return_for_image_generation=True, **size)


FAMILY = Family(
    "Emu3",
    ("pixel_values",),
    is_direct=True,
    placeholders=("image_token_id",),
    image_family=image_family,
)
