"""Fewer visual tokens for the draft model, one idea per file; the target keeps all of its own."""

from typing import TYPE_CHECKING

from mmspec._lazy import lazy

if TYPE_CHECKING:
    from mmspec.compressors.attn_topk import AttentionTopK
    from mmspec.compressors.average_pool import AveragePool
    from mmspec.compressors.average_pool_1d import AveragePool1d
    from mmspec.compressors.bipartite_merge import BipartiteMerge
    from mmspec.compressors.cls_topk import ClsTopK
    from mmspec.compressors.dream_topk import DreamTopK
    from mmspec.compressors.farthest_point import FarthestPoint
    from mmspec.compressors.hide_all import HideAll
    from mmspec.compressors.holistic import Holistic
    from mmspec.compressors.identity import Identity
    from mmspec.compressors.naming import named
    from mmspec.compressors.similarity_prune import SimilarityPrune
    from mmspec.compressors.temporal_redundancy import TemporalRedundancy
    from mmspec.compressors.text_similarity import TextSimilarity
    from mmspec.compressors.top_p_uniform import TopPUniform
    from mmspec.compressors.uv_prune import UvPrune

__all__ = [
    "AttentionTopK",
    "AveragePool",
    "AveragePool1d",
    "BipartiteMerge",
    "ClsTopK",
    "DreamTopK",
    "FarthestPoint",
    "HideAll",
    "Holistic",
    "Identity",
    "SimilarityPrune",
    "TemporalRedundancy",
    "TextSimilarity",
    "TopPUniform",
    "UvPrune",
    "named",
]

_HOMES = {
    "AttentionTopK": "mmspec.compressors.attn_topk",
    "AveragePool": "mmspec.compressors.average_pool",
    "AveragePool1d": "mmspec.compressors.average_pool_1d",
    "BipartiteMerge": "mmspec.compressors.bipartite_merge",
    "ClsTopK": "mmspec.compressors.cls_topk",
    "DreamTopK": "mmspec.compressors.dream_topk",
    "FarthestPoint": "mmspec.compressors.farthest_point",
    "HideAll": "mmspec.compressors.hide_all",
    "Holistic": "mmspec.compressors.holistic",
    "Identity": "mmspec.compressors.identity",
    "SimilarityPrune": "mmspec.compressors.similarity_prune",
    "TemporalRedundancy": "mmspec.compressors.temporal_redundancy",
    "TextSimilarity": "mmspec.compressors.text_similarity",
    "TopPUniform": "mmspec.compressors.top_p_uniform",
    "UvPrune": "mmspec.compressors.uv_prune",
    "named": "mmspec.compressors.naming",
}

if not TYPE_CHECKING:  # a type checker reads the imports above, and so sees misspelt names
    __getattr__, __dir__ = lazy(__name__, _HOMES)
