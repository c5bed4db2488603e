"""ViSpec heads as published (Kang et al. 2025): EAGLE's names and an image adaptor's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.eagle import PLAIN, build_eagle_head, to_published
from mmspec.formats.head_files import PublishedHead, check_head, head_format, open_head
from mmspec.models.heads.feature_head import FeatureHead

QUERIES = "imadpt.q"


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> FeatureHead:
    """Convert the head in a folder."""
    found = open_head(files)
    if QUERIES not in found.tensors:
        raise ValueError(f"{found.file} has no {QUERIES}; give a head of ViSpec, or format eagle")
    queries = len(found.tensors[QUERIES])
    return build_eagle_head(found, "ViSpec", visual_slots="compressed", num_q=queries)


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head for the authors' code."""
    plain = {**PLAIN, "visual_slots": "compressed", "num_latents": 0}
    check_head(head, FeatureHead, "vispec", plain)
    made = to_published(head)
    return PublishedHead({**made.config, "num_q": head.config.num_q}, made.tensors)


FORMAT = head_format(
    "ViSpec (Kang et al. 2025): EAGLE's format with an image adaptor.", convert, export
)
