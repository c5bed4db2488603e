"""Emu3 draws with its language model's own head: picture tokens are words of the vocabulary.

Wang et al. 2024. A row of codes ends with EOL; behind the last row come end-of-frame, end-of-image
and end-of-sequence. The prompt is the processor's (`return_for_image_generation=True`) and names
height and width, so the grid must be the one that it names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.codes.image_family import ImageFamily, codebook
from mmspec.modalities.image.drawing import spoken, token_request
from mmspec.targets.readers.family import Family

ENDS = ("<|extra_201|>", "<|image end|>")  # of the frame, of the picture


def image_family(model: Any) -> ImageFamily:
    """How an `Emu3ForConditionalGeneration` draws.

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
        codebook=codebook(name, vq.quantize.embedding.weight, codes, vocabulary),
        layout=layout,
        size=None,
        guidance=3.0,
        decode=vq.decode,
        inputs=("input_ids", "attention_mask"),
        request=partial(token_request, model, vocabulary),
        words=words,
        encode=encode,
    )


def words(processor: Any, texts: Sequence[str], grid: Grid) -> Mapping[str, Any]:
    """Prompts with the size of the picture and begin-of-image behind them."""
    pixels = processor.downsample_ratio**2 * grid.cells
    size = {"ratio": f"{grid.width}:{grid.height}", "image_area": pixels}
    return spoken(processor, texts, return_for_image_generation=True, **size)


FAMILY = Family(
    "Emu3",
    ("pixel_values",),
    direct=True,
    placeholders=("image_token_id",),
    image_family=image_family,
)
