"""EAGLE-3 heads as vLLM reads them: id l of a list of layers is the state that enters layer l."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.eagle_3 import listed, read, written
from mmspec.formats.head_files import PublishedHead, check_head, head_format, opened
from mmspec.models.heads.eagle3 import Eagle3Head


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> Eagle3Head:
    """The head that a folder holds."""
    found = opened(files)
    return read(found, listed(found.config), "EAGLE-3")


def export(head: Any, target: str | None) -> PublishedHead:
    """The head with its layers as vLLM counts them."""
    check_head(head, Eagle3Head, "vllm", {"positions": "keep"})
    return written(head, "vllm", head.config.tapped_layers)


FORMAT = head_format(
    "EAGLE-3 in vLLM's dialect: listed layers are those that states enter.", convert, export
)
