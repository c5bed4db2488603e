"""EAGLE-3 heads of vLLM: layer id l means the input of layer l; and their targets.

vLLM 0.32 reads the vision towers of LLaVA under the names before transformers 5. Each of `TARGETS`
was loaded there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmspec.formats.eagle_3 import (
    VARIANTS,
    Dialect,
    build_eagle3_head,
    listed_layers,
    to_published,
)
from mmspec.formats.head_files import PublishedHead, check_head, head_format, open_head
from mmspec.models.heads.eagle3 import Eagle3Head, FusedStateHead

EXPRESSIBLE = frozenset(
    (*VARIANTS, "qk_norm", "num_hidden_layers", "num_taps", "sliding_window", "attention_bias")
)
VLLM = Dialect("vllm", EXPRESSIBLE)


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> Eagle3Head:
    """Convert the head in a folder."""
    found = open_head(files)
    head: Eagle3Head = build_eagle3_head(found, listed_layers(found.config), VLLM)
    return head


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head with vLLM's layer ids.

    Raises ValueError for layers out of order: vLLM sorts them, and drops repeated ones.
    """
    check_head(head, Eagle3Head, "vllm", {})
    return export_ordered(head)


def export_ordered(head: Any) -> PublishedHead:
    """Export a head of EAGLE-3's layout. Raises ValueError as `export` does."""
    if head.config.positions != "mrope":  # vLLM's, where rope_parameters have an mrope_section
        check_head(head, FusedStateHead, "vllm", {"positions": "keep"})
    layers = head.config.tapped_layers
    check_order(layers)
    return to_published(head, VLLM, layers)


def check_order(layers: Sequence[int] | None) -> None:
    """Refuse layers in an order that vLLM does not keep. Raises ValueError."""
    if layers is not None and list(layers) != sorted(set(layers)):
        raise ValueError(
            f"this head reads the layers {list(layers)}, but vLLM reads them in ascending order "
            "and once each; train a head with such tapped_layers"
        )


_NESTED_TOWER = ((r"(?:model\.)?vision_tower\.(?:vision_model\.)?", "vision_tower.vision_model."),)
TARGETS: dict[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ()),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ()),
    "llava with clip_vision_model": _NESTED_TOWER,
    "llava with siglip_vision_model": _NESTED_TOWER,
    "llava_next with clip_vision_model": _NESTED_TOWER,
}
FORMAT = replace(
    head_format("EAGLE-3 of vLLM: lists the layers whose inputs are fused.", convert, export),
    targets=TARGETS,
)
