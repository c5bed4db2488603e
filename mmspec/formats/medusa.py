"""Medusa heads as published (Cai et al. 2024): the heads alone.

Released configurations have wrong head counts or no sizes, so sizes are read from tensor shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.head_files import (
    PublishedHead,
    build_head,
    check_head,
    copy_tensors,
    head_format,
    open_head,
)
from mmspec.models.heads.medusa import MedusaHeads, MedusaHeadsConfig

WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
PREFIX = "medusa_head."  # in files of whole models
_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> MedusaHeads:
    """Convert the heads in a folder. Raises ValueError for names of another format."""
    found = open_head(files, WEIGHTS)
    tensors = {name.removeprefix(PREFIX): one for name, one in found.tensors.items()}
    parts = [one for one in map(_NAME.fullmatch, tensors) if one is not None]
    outputs = [one for one in parts if one[3] == "weight"]
    if not outputs:
        raise ValueError(
            f"{found.file} has no output matrix such as 0.1.weight; give heads of Medusa as their "
            "authors publish them"
        )
    size, width = tensors[outputs[0][0]].shape
    config = MedusaHeadsConfig(
        hidden_size=width,
        vocab_size=size,
        medusa_num_heads=1 + max(int(one[1]) for one in parts),
        medusa_num_layers=max(int(one[2]) for one in outputs),
    )
    published = PublishedHead(found.config, tensors, found.file)
    heads: MedusaHeads = build_head(lambda: MedusaHeads(config), published, "Medusa")
    return heads


def export(head: Any, target: str | None) -> PublishedHead:
    """Export heads as the authors' trainer writes them."""
    check_head(head, MedusaHeads, "medusa", {})
    config = {
        "medusa_num_heads": head.config.medusa_num_heads,
        "medusa_num_layers": head.config.medusa_num_layers,
        "base_model_name_or_path": target,
    }
    return PublishedHead(config, copy_tensors(head), Path(WEIGHTS[0]))


FORMAT = head_format(
    "Medusa (Cai et al. 2024): residual blocks and output matrices.", convert, export
)
