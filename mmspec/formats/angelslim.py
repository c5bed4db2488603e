"""EAGLE-3 heads of AngelSlim: layers listed as in SGLang, M-RoPE for Qwen-VL, no further norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.eagle_3 import Dialect
from mmspec.formats.head_files import PublishedHead, head_format
from mmspec.formats.sglang import convert_from_outputs, export_outputs
from mmspec.models.heads.eagle3 import Eagle3Head

ANGELSLIM = Dialect("angelslim")


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> Eagle3Head:
    """Convert the head in a folder."""
    return convert_from_outputs(files, ANGELSLIM)


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head with AngelSlim's layer ids; the embedding table is the target's."""
    return export_outputs(head, ANGELSLIM)


FORMAT = head_format(
    "EAGLE-3 of AngelSlim: lists the layers whose outputs are fused.", convert, export
)
