"""Kangaroo as its authors publish adapters (Liu et al. 2024): one attention, a norm, no MLP.

No file says how many layers of the target run in front: 2 of Vicuna 7B, 3 of 13B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.errors import check_number
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
from mmspec.models.heads.kangaroo import KangarooAdapter, KangarooAdapterConfig

IGNORED = (r"embed_tokens\.weight", r".*\.rotary_emb\.inv_freq")


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> KangarooAdapter:
    """The adapter that a folder holds. Raises ValueError where its place is not said."""
    found, place = opened(files), options.get("exit_layer")
    if place is None:
        raise ValueError(
            f"{found.file} does not say behind how many layers of the target it stands; give "
            "exit_layer= as it was trained: 2 for Vicuna 7B, 3 for 13B"
        )
    check_number("exit_layer", place, 1, whole=True, example=2)
    config = KangarooAdapterConfig(**shape(found.config, found.file), exit_layer=place)
    adapter: KangarooAdapter = filled(lambda: KangarooAdapter(config), found, "Kangaroo", IGNORED)
    return adapter


def export(head: Any, target: str | None) -> PublishedHead:
    """The adapter under the authors' names; whoever reads it must be told its `exit_layer`."""
    check_head(head, KangarooAdapter, "kangaroo", {"attention_bias": False})
    return PublishedHead(llama(head.config, "AdapterModel"), own_tensors(head))


FORMAT = head_format(
    "Kangaroo (Liu et al. 2024): an adapter behind the first layers.",
    convert,
    export,
    exit_layer="Layers of the target in front: 2 for Vicuna 7B, 3 for 13B.",
)
