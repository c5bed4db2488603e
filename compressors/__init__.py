"""Fewer visual tokens for the draft model, one idea per file; the target keeps all of its own."""

from typing import TYPE_CHECKING

from mmspec._lazy import lazy

if TYPE_CHECKING:
    from mmspec.compressors.attn_topk import AttentionTopK
    from mmspec.compressors.average_pool import AveragePool
    from mmspec.compressors.average_pool_1d import AveragePool1d
    from mmspec.compressors.bipartite_merge import BipartiteMerge
    from mmspec.compressors.cls_topk import ClsTopK
    from mmspec.compressors.conv import Conv
    from mmspec.compressors.dream_topk import DreamTopK
    from mmspec.compressors.elastic_gate import ElasticGate
    from mmspec.compressors.farthest_point import FarthestPoint
    from mmspec.compressors.hide_all import HideAll
    from mmspec.compressors.holistic import Holistic
    from mmspec.compressors.identity import Identity
    from mmspec.compressors.latent import Latent
    from mmspec.compressors.learned import save
    from mmspec.compressors.naming import named
    from mmspec.compressors.q_former import QFormer
    from mmspec.compressors.resampler import Resampler
    from mmspec.compressors.similarity_prune import SimilarityPrune
    from mmspec.compressors.space_to_depth import SpaceToDepth
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
    "Conv",
    "DreamTopK",
    "ElasticGate",
    "FarthestPoint",
    "HideAll",
    "Holistic",
    "Identity",
    "Latent",
    "QFormer",
    "Resampler",
    "SimilarityPrune",
    "SpaceToDepth",
    "TemporalRedundancy",
    "TextSimilarity",
    "TopPUniform",
    "UvPrune",
    "named",
    "save",
]

_HOMES = {
    "AttentionTopK": "mmspec.compressors.attn_topk",
    "AveragePool": "mmspec.compressors.average_pool",
    "AveragePool1d": "mmspec.compressors.average_pool_1d",
    "BipartiteMerge": "mmspec.compressors.bipartite_merge",
    "ClsTopK": "mmspec.compressors.cls_topk",
    "Conv": "mmspec.compressors.conv",
    "DreamTopK": "mmspec.compressors.dream_topk",
    "ElasticGate": "mmspec.compressors.elastic_gate",
    "FarthestPoint": "mmspec.compressors.farthest_point",
    "HideAll": "mmspec.compressors.hide_all",
    "Holistic": "mmspec.compressors.holistic",
    "Identity": "mmspec.compressors.identity",
    "Latent": "mmspec.compressors.latent",
    "QFormer": "mmspec.compressors.q_former",
    "Resampler": "mmspec.compressors.resampler",
    "SimilarityPrune": "mmspec.compressors.similarity_prune",
    "SpaceToDepth": "mmspec.compressors.space_to_depth",
    "TemporalRedundancy": "mmspec.compressors.temporal_redundancy",
    "TextSimilarity": "mmspec.compressors.text_similarity",
    "TopPUniform": "mmspec.compressors.top_p_uniform",
    "UvPrune": "mmspec.compressors.uv_prune",
    "named": "mmspec.compressors.naming",
    "save": "mmspec.compressors.learned",
}

if not TYPE_CHECKING:  # a type checker reads the imports above, and so sees misspelt names
    __getattr__, __dir__ = lazy(__name__, _HOMES)
