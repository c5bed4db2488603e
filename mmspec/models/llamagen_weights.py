"""Convert public LlamaGen checkpoints to this package's names, and back.

Only names and the order of channels differ. Fused projections are split; the rows of q and k are
reordered within each head, as a rotary pair is (2i, 2i + 1) in public files and (i, i + d/2) here:

    public   0 1 2 3 4 5        here   0 2 4 1 3 5
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor

from mmspec.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration
from mmspec.models.public_weights import map_public_weights, parse_names, public_name

MODEL = parse_names(  # own pattern -> public name
    r"""
    model\.embed_tokens\.                             tok_embeddings.
    model\.norm\.                                     norm.
    lm_head\.                                         output.
    model\.condition\.embedding\.                     cls_embedding.embedding_table.
    model\.condition\.fc                              cls_embedding.cap_proj.fc
    model\.condition\.unconditional                   cls_embedding.uncond_embedding
    model\.layers\.(\d+)\.self_attn\.o_proj\.         layers.\1.attention.wo.
    model\.layers\.(\d+)\.mlp\.gate_proj\.            layers.\1.feed_forward.w1.
    model\.layers\.(\d+)\.mlp\.up_proj\.              layers.\1.feed_forward.w3.
    model\.layers\.(\d+)\.mlp\.down_proj\.            layers.\1.feed_forward.w2.
    model\.layers\.(\d+)\.input_layernorm\.           layers.\1.attention_norm.
    model\.layers\.(\d+)\.post_attention_layernorm\.  layers.\1.ffn_norm.
    """
)
PICTURE = parse_names(  # likewise
    r"""
    vqmodel\.embedding\.              quantize.embedding.
    vqmodel\.post_quant_conv\.        post_quant_conv.
    vqmodel\.decoder\.mid\.block_1\.  decoder.mid.0.
    vqmodel\.decoder\.mid\.attn_1\.   decoder.mid.1.
    vqmodel\.decoder\.mid\.block_2\.  decoder.mid.2.
    vqmodel\.decoder\.                decoder.
    """
)
_LEVEL = re.compile(r"(vqmodel\.decoder)\.up\.(\d+)\.(block|attn|upsample)\.")
_FUSED = re.compile(r"(model\.layers\.(\d+)\.self_attn)\.([qkv])_proj\.weight")


def load_public(
    model: LlamaGenForImageGeneration, weights: str | Path, picture: str | Path | None = None
) -> None:
    """Load public weights, converted to safetensors files, into a model in place.

    `weights` are the language model's, `picture` the tokeniser's, which a model with a `vq_config`
    needs. Raises ValueError naming missing weights.
    """
    if (picture is None) != (model.vqmodel is None):
        raise ValueError(
            "the tokeniser's weights go with a vq_config; give both picture= and a model whose "
            "configuration has one, or neither"
        )
    files = [weights] if picture is None else [weights, picture]
    found = {name: value for file in files for name, value in load_file(file).items()}
    model.load_state_dict(from_public(found, model))


def from_public(
    public: Mapping[str, Tensor], model: LlamaGenForImageGeneration
) -> dict[str, Tensor]:
    """Rename public weights to the model's names; drop those not used for decoding."""

    def part(name: str, value: Tensor) -> Tensor:
        fused = _FUSED.fullmatch(name)
        return value if fused is None else _parts(value, model.config)[fused[3]]

    return map_public_weights(model.state_dict(), public, _Names(model.config), part)


def to_public(model: LlamaGenForImageGeneration) -> dict[str, Tensor]:
    """Rename the model's weights to the public names."""
    config, own, public = model.config, model.state_dict(), dict[str, Tensor]()
    theirs = _Names(config)
    for name, value in own.items():
        fused = _FUSED.fullmatch(name)
        if fused is None:
            public[theirs(name)] = value
        elif fused[3] == "q":
            q, k, v = (own[f"{fused[1]}.{part}_proj.weight"] for part in "qkv")
            halves = [_interleave(q, config), _interleave(k, config), v]
            public[theirs(name)] = torch.cat(halves)
    return public


class _Names:
    """Maps names of the model's weights to public names."""

    def __init__(self, config: LlamaGenConfig) -> None:
        picture = config.vq_config or {}
        self.deepest = len(picture.get("channel_multiplier", (1, 1, 2, 2, 4))) - 1

    def __call__(self, name: str) -> str:
        if fused := _FUSED.fullmatch(name):
            return f"layers.{fused[2]}.attention.wqkv.weight"
        if level := _LEVEL.match(name):
            part = {"block": "res"}.get(level[3], level[3])
            block = self.deepest - int(level[2])  # public blocks count from the deepest level
            return f"decoder.conv_blocks.{block}.{part}.{name[level.end() :]}"
        return public_name(name, MODEL + PICTURE)


def _parts(fused: Tensor, config: LlamaGenConfig) -> dict[str, Tensor]:
    """Split a fused projection into queries, keys and values, in this package's order."""
    width = config.hidden_size // config.num_attention_heads
    keys = width * (config.num_key_value_heads or config.num_attention_heads)
    q, k, v = fused.split([config.hidden_size, keys, keys])
    return {"q": _deinterleave(q, config), "k": _deinterleave(k, config), "v": v}


def _deinterleave(rows: Tensor, config: LlamaGenConfig) -> Tensor:
    half = config.hidden_size // config.num_attention_heads // 2
    return rearrange(rows, "(h i two) d -> (h two i) d", i=half, two=2)


def _interleave(rows: Tensor, config: LlamaGenConfig) -> Tensor:
    half = config.hidden_size // config.num_attention_heads // 2
    return rearrange(rows, "(h two i) d -> (h i two) d", i=half, two=2)
