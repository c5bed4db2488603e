"""Chameleon weights that draw: Anole's plain raster, Lumina-mGPT's rows with newlines.

The prompt ends with begin-of-image; unconditional is that token alone (Liu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mmspec.codes.grid import Grid
from mmspec.codes.image_family import ImageFamily, codebook, encoder
from mmspec.modalities.image.drawing import spoken, token_request
from mmspec.models.chameleon import ChameleonForImageGeneration
from mmspec.targets.readers.family import Family

NEWLINE, END, SIZES = 8803, 8196, 8804  # Lumina-mGPT: row end, image end, first size token
SHRINKS = 16  # pixels per code


def image_family(model: ChameleonForImageGeneration) -> ImageFamily:
    """How a Chameleon draws: rows of codes, as Anole does; for newlines give `grid=lumina(...)`."""
    mapping: Any = model.model.vocabulary_mapping
    vq: Any = model.model.vqmodel
    name = type(model).__name__
    codes = torch.tensor([token for _, token in sorted(mapping.img2bpe.items())])
    book = codebook(name, vq.quantize.embedding.weight, codes, model.config.vocab_size)
    vision: Any = model.config.vq_config
    side = vision.resolution // SHRINKS

    def layout(height: int, width: int) -> Grid:
        return Grid(height, width, codes)

    return ImageFamily(
        name=name,
        codebook=book,
        layout=layout,
        size=(side, side),
        guidance=3.0,
        decode=model.decode_codes,
        inputs=("input_ids", "attention_mask"),
        request=partial(token_request, model, model.config.vocab_size),
        unconditional=unconditional,
        words=words,
        encode=encoder(vq, book),
    )


def words(processor: Any, texts: Sequence[str], grid: Grid) -> Mapping[str, Any]:
    """Prompts with begin-of-image behind them."""
    texts = [f"{text}{processor.image_start_token}" for text in texts]
    return spoken(processor, texts, return_for_text_completion=True)


def lumina(
    model: ChameleonForImageGeneration,
    height: int,
    width: int,
    newline: int = NEWLINE,
    end: int = END,
    sizes: int = SIZES,
) -> Grid:
    """Lumina-mGPT's layout: two size tokens, rows that end with a newline, image end.

    A size token counts steps of two codes. Raises ValueError for odd sizes.
    """
    if height % 2 or width % 2:
        raise ValueError(
            f"{height} x {width} has no size tokens: they count steps of two codes; give even "
            "numbers"
        )
    header = (sizes + height // 2, sizes + width // 2)
    codes = image_family(model).codebook.ids.cpu()
    return Grid(height, width, codes, separator=newline, header=header, footer=(end,))


def unconditional(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The last token of every prompt."""
    return {name: inputs[name][:, -1:] for name in ("input_ids", "attention_mask")}


FAMILY = Family(
    "Chameleon",
    ("pixel_values",),
    direct=True,
    placeholders=("image_token_id",),
    image_family=image_family,
)
