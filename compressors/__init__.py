"""Fewer visual tokens for the draft model, one idea per file; the target keeps all of its own.

Here they are by name, for command lines and `accelerate(compressor="...")`:
"attn-topk" is one as it comes, "attn-topk:keep=0.25" one with a parameter,
"top-p-uniform:keep=0.1,mass=0.3" one with several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mmspec.naming import parameters

if TYPE_CHECKING:
    from mmspec.compressors.contract import Compressor

COMPRESSORS: Mapping[str, tuple[str, str]] = {  # file and class; loaded when asked for
    "attn-topk": ("attn_topk", "AttentionTopK"),
    "average-pool": ("average_pool", "AveragePool"),
    "average-pool-1d": ("average_pool_1d", "AveragePool1d"),
    "bipartite-merge": ("bipartite_merge", "BipartiteMerge"),
    "cls-topk": ("cls_topk", "ClsTopK"),
    "conv": ("conv", "Conv"),
    "dream-topk": ("dream_topk", "DreamTopK"),
    "elastic-gate": ("elastic_gate", "ElasticGate"),
    "farthest-point": ("farthest_point", "FarthestPoint"),
    "hide-all": ("hide_all", "HideAll"),
    "holistic": ("holistic", "Holistic"),
    "identity": ("identity", "Identity"),
    "latent": ("latent", "Latent"),
    "q-former": ("q_former", "QFormer"),
    "resampler": ("resampler", "QueryResampler"),
    "similarity-prune": ("similarity_prune", "SimilarityPrune"),
    "space-to-depth": ("space_to_depth", "SpaceToDepth"),
    "temporal-redundancy": ("temporal_redundancy", "TemporalRedundancy"),
    "text-similarity": ("text_similarity", "TextSimilarity"),
    "top-p-uniform": ("top_p_uniform", "TopPUniform"),
    "uv-prune": ("uv_prune", "UvPrune"),
}


def kind(name: str) -> type[Any]:
    """The class of that name. Raises ValueError listing the known ones."""
    if name not in COMPRESSORS:
        near = get_close_matches(name, COMPRESSORS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        known = ", ".join(sorted(COMPRESSORS))
        raise ValueError(f"there is no compressor {name!r}{hint} known: {known}, or pass an object")
    file, maker = COMPRESSORS[name]
    found: type[Any] = getattr(import_module(f"mmspec.compressors.{file}"), maker)
    return found


def named(text: str) -> Compressor:
    """The compressor of that name, with the parameters behind it.

    Raises ValueError for unknown names and parameters, listing the known ones, and for values out
    of range.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no name of a compressor; give one such as 'average-pool'")
    name, _, rest = text.partition(":")
    maker = kind(name)
    known = {one.name: one.default for one in fields(maker)}
    made: Compressor = maker(**parameters(rest, known, name))
    return made


def about(name: str) -> dict[str, Any]:
    """A compressor as plain data: what it does, needs, gives, and its parameters' defaults."""
    maker = kind(name)
    made = named(name)
    return {
        "name": name,
        "summary": (maker.__doc__ or "").strip().partition("\n")[0],
        "needs": sorted(made.needs),
        "kept of 576": made.count(576, (24, 24)),
        "places": made.places,
        "parameters": {one.name: one.default for one in fields(maker)},
        "trained": any(one.name == "weights" for one in fields(maker)),
    }
