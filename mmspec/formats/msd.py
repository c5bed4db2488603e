"""MSD as its authors publish heads (Lin et al. 2025): EAGLE's names, visual slots that are bare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats import Format
from mmspec.formats.eagle import PLAIN, read, written
from mmspec.formats.head_files import FILES, PublishedHead, check_head, opened
from mmspec.models.heads.feature_head import FeatureHead


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> FeatureHead:
    """The head that a folder holds."""
    return read(opened(files), "MSD", visual_slots="raw")


def export(head: Any, target: str | None) -> PublishedHead:
    """The head as the authors' code reads it."""
    check_head(head, FeatureHead, "msd", {**PLAIN, "visual_slots": "raw"})
    return written(head)


FORMAT = Format(
    about="MSD (Lin et al. 2025): EAGLE's layout; its code reads visual slots bare.",
    files=FILES,
    convert=convert,
    export=export,
)
