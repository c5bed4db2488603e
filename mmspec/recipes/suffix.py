"""Suffix automaton: copy what followed the longest suffix of the text that has appeared before.

Hu et al. 2024 (SAM-Decoding), the dynamic automaton. Exact; O(1) amortised per token.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.suffix import suffix_automaton
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=suffix_automaton,
    execution=Chain(Fixed(10)),
    verifier=Coupled(),
    options={"shortest": 2},
    least={"shortest": 1},
    paper="Hu et al. 2024",
)
