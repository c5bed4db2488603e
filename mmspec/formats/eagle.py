"""EAGLE and EAGLE-2 heads as published (Li et al. 2024): one layer, the target's output head.

Embedding tables in some files are the target's and are ignored. Biases of q, k and v (Qwen2) come
without one of o, which is set to zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.head_files import (
    PublishedHead,
    build_head,
    check_head,
    copy_tensors,
    head_format,
    llama_config,
    open_head,
    read_sizes,
)
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig

IGNORED = (r"embed_tokens\.weight",)
ZERO = (r"layers\.\d+\.self_attn\.o_proj\.bias",)
PLAIN = {
    **{"tapped_layers": None, "visual_slots": "fused", "positions": "keep", "num_steps": 0},
    **{"visual_keep": 1.0, "input_norm": False, "sliding_window": None},
}


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> FeatureHead:
    """Convert the head in a folder."""
    return build_eagle_head(open_head(files), "EAGLE")


def build_eagle_head(found: PublishedHead, layout: str, **changes: Any) -> FeatureHead:
    """Build a head from published weights; `changes` override its configuration."""
    config = FeatureHeadConfig(
        **read_sizes(found.config, found.file),
        num_hidden_layers=found.config.get("num_hidden_layers", 1),
        bias="fc.bias" in found.tensors,
        attention_bias="layers.0.self_attn.q_proj.bias" in found.tensors,
        **changes,
    )
    head: FeatureHead = build_head(lambda: FeatureHead(config), found, layout, IGNORED, ZERO)
    return head


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head for vLLM, SGLang and the authors' code."""
    check_head(head, FeatureHead, "eagle", PLAIN)
    return to_published(head)


def to_published(head: FeatureHead) -> PublishedHead:
    """Return the flat configuration and the weights, without the bias that the format lacks."""
    tensors = copy_tensors(head)
    for name in [one for one in tensors if one.endswith("o_proj.bias")]:
        if bool(tensors.pop(name).any()):
            raise ValueError(
                f"{name} of this head is not zero, and engines do not read it; train a head "
                "with attention_bias=False"
            )
    config = {**llama_config(head.config, "LlamaForCausalLMEagle"), "bias": head.config.bias}
    return PublishedHead(config, tensors)


FORMAT = head_format(
    "EAGLE, EAGLE-2 (Li et al. 2024): one-layer heads on the last hidden state.", convert, export
)
