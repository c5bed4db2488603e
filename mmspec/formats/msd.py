"""MSD heads as published (Lin et al. 2025): EAGLE's names, image slots without features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.eagle import PLAIN, build_eagle_head, to_published
from mmspec.formats.head_files import PublishedHead, check_head, head_format, open_head
from mmspec.models.heads.feature_head import FeatureHead


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> FeatureHead:
    """Convert the head in a folder."""
    return build_eagle_head(open_head(files), "MSD", visual_slots="raw")


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head for the authors' code."""
    check_head(head, FeatureHead, "msd", {**PLAIN, "visual_slots": "raw"})
    return to_published(head)


FORMAT = head_format(
    "MSD (Lin et al. 2025): EAGLE's format; image slots are embeddings alone.", convert, export
)
