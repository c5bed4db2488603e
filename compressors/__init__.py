"""Fewer visual tokens for the draft model, one idea per file; the target keeps all of its own."""

from typing import TYPE_CHECKING

from mmspec._lazy import lazy

if TYPE_CHECKING:
    from mmspec.compressors.attn_topk import AttentionTopK
    from mmspec.compressors.average_pool import AveragePool
    from mmspec.compressors.bipartite_merge import BipartiteMerge
    from mmspec.compressors.contract import named
    from mmspec.compressors.hide_all import HideAll
    from mmspec.compressors.identity import Identity

__all__ = [
    "AttentionTopK",
    "AveragePool",
    "BipartiteMerge",
    "HideAll",
    "Identity",
    "named",
]

_HOMES = {
    "AttentionTopK": "mmspec.compressors.attn_topk",
    "AveragePool": "mmspec.compressors.average_pool",
    "BipartiteMerge": "mmspec.compressors.bipartite_merge",
    "HideAll": "mmspec.compressors.hide_all",
    "Identity": "mmspec.compressors.identity",
    "named": "mmspec.compressors.contract",
}

if not TYPE_CHECKING:  # a type checker reads the imports above, and so sees misspelt names
    __getattr__, __dir__ = lazy(__name__, _HOMES)
