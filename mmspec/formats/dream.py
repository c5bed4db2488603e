"""DREAM heads as published (Hu et al. 2025): two layers and a gated cross-attention.

The released code drafts from all slots of an image; the option `visual_keep` reads fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.errors import check_number
from mmspec.formats.eagle import PLAIN
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
from mmspec.models.heads.dream import DreamHead, DreamHeadConfig

IGNORED = (r"embed_(tokens|model)\.weight", r".*\.rotary_emb\.inv_freq")
ZERO = (r"layers\.[02]\.self_attn\.o_proj\.bias",)


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> DreamHead:
    """Convert the head in a folder."""
    found, keep = open_head(files), options.get("visual_keep", 1.0)
    check_number("visual_keep", keep, 0, 1, example=0.5)
    config = DreamHeadConfig(
        **read_sizes(found.config, found.file),
        attention_bias="layers.0.self_attn.q_proj.bias" in found.tensors,
        visual_keep=keep,
    )
    head: DreamHead = build_head(lambda: DreamHead(config), found, "DREAM", IGNORED, ZERO)
    return head


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head for the authors' code, which reads all slots of an image."""
    plain = {name: only for name, only in PLAIN.items() if name != "input_norm"}
    plain["attention_bias"] = False
    check_head(head, DreamHead, "dream", plain)
    return PublishedHead(llama_config(head.config, "LlamaForCausalLM"), copy_tensors(head))


FORMAT = head_format(
    "DREAM (Hu et al. 2025): a head that attends to the target's states.",
    convert,
    export,
    visual_keep="Share of an image's slots that is read; 1 as released.",
)
