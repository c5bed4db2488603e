"""MSD as its authors publish heads (Lin et al. 2025): EAGLE's names, visual slots that are bare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.eagle import PLAIN, read, written
from mmspec.formats.head_files import PublishedHead, check_head, head_format, opened
from mmspec.models.heads.feature_head import FeatureHead


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> FeatureHead:
    """The head that a folder holds."""
    return read(opened(files), "MSD", visual_slots="raw")


def export(head: Any, target: str | None) -> PublishedHead:
    """The head as the authors' code reads it."""
    check_head(head, FeatureHead, "msd", {**PLAIN, "visual_slots": "raw"})
    return written(head)


FORMAT = head_format(
    "MSD (Lin et al. 2025): EAGLE's layout; its code reads visual slots bare.", convert, export
)
