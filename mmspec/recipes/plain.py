"""Plain decoding: no drafter, one token per forward, with the noise of the coupled recipes.

Exact. The baseline that every exact coupled recipe reproduces token for token, greedy or sampled.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.plain import no_drafter
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(architecture=no_drafter, execution=Chain(Fixed(1)), verifier=Coupled())
