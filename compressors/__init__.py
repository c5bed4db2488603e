"""Fewer visual tokens for the draft model, one idea per file; the target keeps all of its own."""

from mmspec.compressors.attn_topk import AttentionTopK
from mmspec.compressors.average_pool import AveragePool
from mmspec.compressors.bipartite_merge import BipartiteMerge
from mmspec.compressors.hide_all import HideAll
from mmspec.compressors.identity import Identity
from mmspec.compressors.naming import named

__all__ = ["AttentionTopK", "AveragePool", "BipartiteMerge", "HideAll", "Identity", "named"]
