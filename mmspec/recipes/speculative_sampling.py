"""Speculative sampling: accept a small model's draft with min(1, p/q), else correct it.

Leviathan et al. 2023, algorithm 1; Chen et al. 2023. Exact in law; accepts more than coupled
speculation, but its draws are not those of plain decoding. Greedy output is the target's own.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.length import Fixed
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.recipe import Recipe
from mmspec.verifiers.recursive import Recursive

RECIPE = Recipe(
    architecture=small_model,
    execution=Chain(Fixed(5)),
    verifier=Recursive(),
    sees="auto",
    draft_model=(SMALL_MODEL, FEATURE_HEAD),
    paper="Leviathan et al. 2023; Chen et al. 2023",
)
