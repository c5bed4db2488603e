"""EAGLE-3 heads as SGLang and SpecForge read them: id l is the state that leaves layer l."""

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
    ids = listed(found.config)
    return read(found, None if ids is None else [one + 1 for one in ids], "EAGLE-3")


def export(head: Any, target: str | None) -> PublishedHead:
    """The head with its layers as SGLang counts them; its embedding table is the target's.

    Raises ValueError where a layer would stand before the first one.
    """
    check_head(head, Eagle3Head, "sglang", {"target_hidden_size": None})
    taps = head.config.tapped_layers
    if taps is not None and min(taps) < 1:
        raise ValueError(
            f"this head taps the embeddings (tapped_layers={list(taps)}), which SGLang cannot "
            "list; export it as vllm, or train one on layers from 1 on"
        )
    return written(head, "sglang", None if taps is None else [one - 1 for one in taps])


FORMAT = head_format(
    "EAGLE-3 in the dialect of SGLang, SpecForge: listed layers are those states leave.",
    convert,
    export,
)
