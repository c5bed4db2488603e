"""ViSpec as its authors publish heads (Kang et al. 2025): EAGLE's names and an image adaptor's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.eagle import PLAIN, read, written
from mmspec.formats.head_files import PublishedHead, check_head, head_format, opened
from mmspec.models.heads.feature_head import FeatureHead

QUERIES = "imadpt.q"


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> FeatureHead:
    """The head that a folder holds."""
    found = opened(files)
    if QUERIES not in found.tensors:
        raise ValueError(f"{found.file} has no {QUERIES}; give a head of ViSpec, or format eagle")
    queries = len(found.tensors[QUERIES])
    return read(found, "ViSpec", visual_slots="compressed", num_q=queries)


def export(head: Any, target: str | None) -> PublishedHead:
    """The head as the authors' code reads it."""
    plain = {**PLAIN, "visual_slots": "compressed", "num_latents": 0}
    check_head(head, FeatureHead, "vispec", plain)
    made = written(head)
    return PublishedHead({**made.config, "num_q": head.config.num_q}, made.tensors)


FORMAT = head_format(
    "ViSpec (Kang et al. 2025): EAGLE's layout and an image adaptor.", convert, export
)
