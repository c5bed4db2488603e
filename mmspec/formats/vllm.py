"""EAGLE-3 heads of vLLM: layer id l means the input of layer l."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from mmspec.models.heads.eagle3 import Eagle3Head

EXPRESSIBLE = frozenset(
    (*VARIANTS, "qk_norm", "num_hidden_layers", "num_taps", "sliding_window", "attention_bias")
)
VLLM = Dialect("vllm", EXPRESSIBLE)


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> Eagle3Head:
    """Convert the head in a folder."""
    found = open_head(files)
    return build_eagle3_head(found, listed_layers(found.config), VLLM)


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head with vLLM's layer ids."""
    check_head(head, Eagle3Head, "vllm", {"positions": "keep"})
    return to_published(head, VLLM, head.config.tapped_layers)


FORMAT = head_format("EAGLE-3 of vLLM: lists the layers whose inputs are fused.", convert, export)
