"""Kangaroo adapters as published (Liu et al. 2024): one attention, a norm, no MLP.

No file holds the exit layer: 2 for Vicuna 7B, 3 for 13B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.errors import check_number
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
from mmspec.models.heads.kangaroo import KangarooAdapter, KangarooAdapterConfig

IGNORED = (r"embed_tokens\.weight", r".*\.rotary_emb\.inv_freq")


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> KangarooAdapter:
    """Convert the adapter in a folder. Raises ValueError without `exit_layer`."""
    found, place = open_head(files), options.get("exit_layer")
    if place is None:
        raise ValueError(
            f"{found.file} does not hold the target's exit layer; give exit_layer= as it was "
            "trained: 2 for Vicuna 7B, 3 for 13B"
        )
    check_number("exit_layer", place, 1, whole=True, example=2)
    config = KangarooAdapterConfig(**read_sizes(found.config, found.file), exit_layer=place)
    adapter: KangarooAdapter = build_head(
        lambda: KangarooAdapter(config), found, "Kangaroo", IGNORED
    )
    return adapter


def export(head: Any, target: str | None) -> PublishedHead:
    """Export an adapter under the authors' names, which do not include its `exit_layer`."""
    check_head(head, KangarooAdapter, "kangaroo", {"attention_bias": False, "has_mlp": False})
    return PublishedHead(llama_config(head.config, "AdapterModel"), copy_tensors(head))


FORMAT = head_format(
    "Kangaroo (Liu et al. 2024): an adapter after the first layers.",
    convert,
    export,
    exit_layer="Layers of the target before the adapter: 2 for Vicuna 7B, 3 for 13B.",
)
