"""EAGLE and EAGLE-2 as their authors publish heads (Li et al. 2024): one layer, no head of its own.

The embedding table in some files is the target's own and is left out; biases of q, k and v (Qwen2)
come without one of o, which is zero then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.head_files import (
    PublishedHead,
    check_head,
    filled,
    head_format,
    llama,
    opened,
    own_tensors,
    shape,
)
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig

IGNORED = (r"embed_tokens\.weight",)
ZERO = (r"layers\.\d+\.self_attn\.o_proj\.bias",)
PLAIN = {
    **{"tapped_layers": None, "visual_slots": "fused", "positions": "keep", "num_steps": 0},
    **{"visual_keep": 1.0, "input_norm": False},
}


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> FeatureHead:
    """The head that a folder holds."""
    return read(opened(files), "EAGLE")


def read(found: PublishedHead, layout: str, **changes: Any) -> FeatureHead:
    """A head whose configuration has `changes` beside what is published."""
    config = FeatureHeadConfig(
        **shape(found.config, found.file),
        num_hidden_layers=found.config.get("num_hidden_layers", 1),
        bias="fc.bias" in found.tensors,
        attention_bias="layers.0.self_attn.q_proj.bias" in found.tensors,
        **changes,
    )
    head: FeatureHead = filled(lambda: FeatureHead(config), found, layout, IGNORED, ZERO)
    return head


def export(head: Any, target: str | None) -> PublishedHead:
    """The head as vLLM, SGLang and the authors' code read it."""
    check_head(head, FeatureHead, "eagle", PLAIN)
    return written(head)


def written(head: FeatureHead) -> PublishedHead:
    """The flat configuration, and weights without a bias that the layout lacks."""
    tensors = own_tensors(head)
    for name in [one for one in tensors if one.endswith("o_proj.bias")]:
        if bool(tensors.pop(name).any()):
            raise ValueError(
                f"{name} of this head is not zero, and engines read no such bias; train a head "
                "with attention_bias=False"
            )
    config = {**llama(head.config, "LlamaForCausalLMEagle"), "bias": head.config.bias}
    return PublishedHead(config, tensors)


FORMAT = head_format(
    "EAGLE, EAGLE-2 (Li et al. 2024): heads of one layer on the last state.", convert, export
)
