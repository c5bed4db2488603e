"""EAGLE-3 heads of SGLang and SpecForge: layer id l means the output of layer l."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.eagle_3 import Dialect, build_eagle3_head, listed_layers, to_published
from mmspec.formats.head_files import PublishedHead, check_head, head_format, open_head
from mmspec.models.heads.eagle3 import Eagle3Head

SGLANG = Dialect("sglang", frozenset({"fc_norm"}), is_norm_output_of_logits=True)


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> Eagle3Head:
    """Convert the head in a folder."""
    return convert_from_outputs(files, SGLANG)


def convert_from_outputs(files: Sequence[Path], dialect: Dialect) -> Eagle3Head:
    """Convert a head whose configuration lists the layers whose outputs are fused."""
    found = open_head(files)
    ids = listed_layers(found.config)
    taps = None if ids is None else [one + 1 for one in ids]
    head: Eagle3Head = build_eagle3_head(found, taps, dialect)
    return head


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head with SGLang's layer ids; the embedding table is the target's.

    Raises ValueError for heads that tap the embeddings.
    """
    return export_outputs(head, SGLANG)


def export_outputs(head: Any, dialect: Dialect) -> PublishedHead:
    """Export a head with a list of the layers whose outputs are fused."""
    check_head(head, Eagle3Head, dialect.name, {"target_hidden_size": None})
    taps = head.config.tapped_layers
    if taps is not None and min(taps) < 1:
        raise ValueError(
            f"this head taps the embeddings (tapped_layers={list(taps)}), which SGLang cannot "
            "list; export it as vllm, or train one on layers from 1 on"
        )
    return to_published(head, dialect, None if taps is None else [one - 1 for one in taps])


FORMAT = head_format(
    "EAGLE-3 of SGLang and SpecForge: lists the layers whose outputs are fused.",
    convert,
    export,
)
