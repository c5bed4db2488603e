"""LlamaGen as published (Sun et al. 2024): one file of the language model, one of VQ-16.

Sizes are read from tensor shapes, which lack two of them. The number of heads is known for the
published widths and depths; for other models give `heads`. The image size must always be given as
`side` (256 pixels: 16, 384: 24, 512: 32). Names and sizes are those of the authors' code. No
published file has been converted here: tests use small random weights under its names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.errors import check_number
from mmspec.formats import Format
from mmspec.formats.published import check_known, read_weights
from mmspec.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration
from mmspec.models.llamagen_weights import from_public, to_public

HEADS = {  # of the published models: layers, width -> heads
    (12, 768): 12,
    (24, 1024): 16,
    (36, 1280): 20,
    (48, 1536): 24,
    (48, 2560): 40,
    (22, 2048): 32,
    (24, 3200): 32,
    (32, 4096): 32,
}
UNREAD = r"encoder\..*|quant_conv\..*|quantize\.codebook_used"  # not used for decoding
BUFFERS = r"freqs_cis|causal_mask|layers\.\d+\.attention\.kv_cache\..*"
CLASSES, CAPTION = "cls_embedding.embedding_table.weight", "cls_embedding.uncond_embedding"


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> LlamaGenForImageGeneration:
    """Convert the model in the files, in the wider of their dtypes."""
    found = _without(read_weights(files[0]), BUFFERS)
    picture = _without(read_weights(files[1]), UNREAD) if len(files) > 1 else {}
    config = _config(found, picture, options, files)
    with torch.device("meta"):
        blank = LlamaGenForImageGeneration(config)
    known = to_public(blank)
    for file, part in zip(files, (found, picture), strict=False):
        check_known(part, known, file, "LlamaGen")
    dtypes = {value.dtype for value in (*found.values(), *picture.values())}
    dtype = torch.float32 if len(dtypes) > 1 else dtypes.pop()
    own = from_public({**found, **picture}, blank)
    made = {name: value.to(dtype) for name, value in own.items()}
    blank.load_state_dict(made, assign=True)
    blank.train(False)
    return blank


def _without(found: Mapping[str, Tensor], pattern: str) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if not re.fullmatch(pattern, name)}


def _config(
    found: Mapping[str, Tensor],
    picture: Mapping[str, Tensor],
    options: Mapping[str, Any],
    files: Sequence[Path],
) -> LlamaGenConfig:
    """Read the sizes from tensor shapes. Raises ValueError for missing tensors and options."""
    vocabulary, width = _shape(found, "tok_embeddings.weight", files[0])
    inner, _ = _shape(found, "layers.0.feed_forward.w1.weight", files[0])
    fused, _ = _shape(found, "layers.0.attention.wqkv.weight", files[0])
    depth = 1 + max(int(one[1]) for one in map(re.compile(r"layers\.(\d+)\.").match, found) if one)
    heads = _heads(options.get("heads"), depth, width)
    keys, rest = divmod(fused // (width // heads) - heads, 2)
    if rest or not 0 < keys <= heads or heads % keys:
        raise ValueError(
            f"heads={heads} do not fit a projection of {fused} rows for a width of {width}; give "
            "the number of heads of this model"
        )
    side = options.get("side")
    if side is None:
        raise ValueError(
            "the image size of a LlamaGen is in none of its files; give side= the codes along one "
            "side: 16 for 256 pixels, 24 for 384, 32 for 512"
        )
    check_number("side", side, 1, whole=True, example=16)
    return LlamaGenConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        side=side,
        vq_config=_picture(picture, files[1]) if picture else None,
        **_condition(found, files[0]),
    )


def _heads(given: Any, depth: int, width: int) -> int:
    heads = HEADS.get((depth, width)) if given is None else given
    if heads is None:
        raise ValueError(
            f"no published LlamaGen has {depth} layers of width {width}, and the number of heads "
            "is not in the weights; give heads="
        )
    check_number("heads", heads, 1, whole=True, example=12)
    if width % (4 * heads):  # half of every head is rotated by the row, in pairs
        raise ValueError(
            f"heads={heads} do not cut a width of {width} into heads of 4, 8, 12 ...; give others"
        )
    return int(heads)


def _condition(found: Mapping[str, Tensor], file: Path) -> dict[str, Any]:
    """Read the kind and size of the condition; the last class means none."""
    if CAPTION in found:
        slots, size = _shape(found, CAPTION, file)
        return {"condition": "caption", "condition_length": slots, "caption_size": size}
    classes, _ = _shape(found, CLASSES, file)
    return {"condition": "class", "num_classes": classes - 1}


def _picture(found: Mapping[str, Tensor], file: Path) -> dict[str, Any]:
    """Read the sizes of the tokeniser's decoder, whose blocks count from the deepest level."""
    codes, size = _shape(found, "quantize.embedding.weight", file)
    latent, *_ = _shape(found, "post_quant_conv.weight", file)
    block = re.compile(r"decoder\.conv_blocks\.(\d+)\.res\.(\d+)\.")
    places = {(int(one[1]), int(one[2])) for one in map(block.match, found) if one}
    levels = 1 + max((level for level, _ in places), default=0)
    wide = [
        _shape(found, f"decoder.conv_blocks.{level}.res.0.conv1.weight", file)[0]
        for level in reversed(range(levels))
    ]
    return {
        "num_embeddings": codes,
        "embed_dim": size,
        "latent_channels": latent,
        "base_channels": wide[0],
        "channel_multiplier": [one // wide[0] for one in wide],
        "num_res_blocks": max(place for _, place in places),
    }


def _shape(found: Mapping[str, Tensor], name: str, file: Path) -> tuple[int, ...]:
    if name not in found:
        raise ValueError(f"{file} lacks {name}; give a file of LlamaGen as its authors publish it")
    return tuple(found[name].shape)


FORMAT = Format(
    about="LlamaGen (Sun et al. 2024): the authors' .pt files.",
    files=("the language model", "[the image tokeniser]"),
    convert=convert,
    options={
        "side": "Codes along one side of an image: 16 for 256 pixels, 24 for 384, 32 for 512.",
        "heads": "Attention heads, for models of other sizes than the published ones.",
    },
)
