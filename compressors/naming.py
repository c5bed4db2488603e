"""Compressors by name, for command lines and `accelerate(compressor="...")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mmspec.compressors.attn_topk import AttentionTopK
from mmspec.compressors.average_pool import AveragePool
from mmspec.compressors.bipartite_merge import BipartiteMerge
from mmspec.compressors.contract import Compressor
from mmspec.compressors.hide_all import HideAll
from mmspec.compressors.identity import Identity

COMPRESSORS: Mapping[str, Callable[[], Compressor]] = {
    "average-pool": AveragePool,
    "attn-topk": AttentionTopK,
    "bipartite-merge": BipartiteMerge,
    "hide-all": HideAll,
    "identity": Identity,
}


def named(name: str) -> Compressor:
    """The compressor of that name, as it comes. Raises ValueError listing the known ones."""
    if name not in COMPRESSORS:
        known = ", ".join(sorted(COMPRESSORS))
        raise ValueError(f"there is no compressor {name!r}; known: {known}, or pass an object")
    return COMPRESSORS[name]()
