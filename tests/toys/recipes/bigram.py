"""Bigram: what usually follows a token is drafted, and verified with the target's own noise.

A stranger's recipe. Exact.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled
from tests.toys.bigram_head import BIGRAM, bigram

RECIPE = Recipe(
    architecture=bigram,
    execution=Chain(Fixed(3)),
    verifier=Coupled(),
    sees="auto",
    draft_model=(BIGRAM,),
    paper="Nobody 2026",
)
