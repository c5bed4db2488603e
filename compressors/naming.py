"""Compressors by name, for command lines and `accelerate(compressor="...")`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from mmspec.compressors.contract import Compressor

COMPRESSORS: Mapping[str, tuple[str, str]] = {  # file and class; loaded when asked for
    "average-pool": ("average_pool", "AveragePool"),
    "attn-topk": ("attn_topk", "AttentionTopK"),
    "bipartite-merge": ("bipartite_merge", "BipartiteMerge"),
    "hide-all": ("hide_all", "HideAll"),
    "identity": ("identity", "Identity"),
}


def named(name: str) -> Compressor:
    """The compressor of that name, as it comes. Raises ValueError listing the known ones."""
    if name not in COMPRESSORS:
        known = ", ".join(sorted(COMPRESSORS))
        raise ValueError(f"there is no compressor {name!r}; known: {known}, or pass an object")
    file, maker = COMPRESSORS[name]
    compressor: Compressor = getattr(import_module(f"mmspec.compressors.{file}"), maker)()
    return compressor
