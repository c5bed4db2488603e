"""Image generation with Chameleon weights: Anole's plain raster, Lumina-mGPT's rows with newlines.

The prompt ends with begin-of-image; the unconditional prompt is that token alone (Liu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mmspec.codes.grid import Grid
from mmspec.codes.image_family import ImageFamily, make_codebook, make_encoder
from mmspec.modalities.image.generation import token_request, tokenize_prompts
from mmspec.models.chameleon import ChameleonForImageGeneration
from mmspec.targets.readers.reader import Family

NEWLINE, END, SIZES = 8803, 8196, 8804  # Lumina-mGPT: row end, image end, first size token
SHRINKS = 16  # pixels per code


def image_family(model: ChameleonForImageGeneration) -> ImageFamily:
    """The image family of a Chameleon: rows of codes as in Anole.

    For rows with newlines pass `grid=lumina(...)`.
    """
    mapping: Any = model.model.vocabulary_mapping
    vq: Any = model.model.vqmodel
    name = type(model).__name__
    codes = torch.tensor([token for _, token in sorted(mapping.img2bpe.items())])
    book = make_codebook(name, vq.quantize.embedding.weight, codes, model.config.vocab_size)
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
        tokenize_prompts=words,
        encode=make_encoder(vq, book),
    )


def words(processor: Any, texts: Sequence[str], grid: Grid) -> Mapping[str, Any]:
    """Prompts followed by begin-of-image."""
    texts = [f"{text}{processor.image_start_token}" for text in texts]
    return tokenize_prompts(processor, texts, return_for_text_completion=True)


def lumina(
    model: ChameleonForImageGeneration,
    height: int,
    width: int,
    newline: int = NEWLINE,
    end: int = END,
    sizes: int = SIZES,
) -> Grid:
    """The layout of Lumina-mGPT: two size tokens, rows that end with a newline, image end.

    A size token counts in steps of two codes. Raises ValueError for odd sizes.
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
    is_direct=True,
    placeholders=("image_token_id",),
    image_family=image_family,
)
