"""Token map: a table of what usually follows the last tokens, made of transcripts of a domain.

Token Map Drafting 2025 (arXiv 2507.21522). `map` is a `TokenMap` of
mmspec.drafters.lookup.token_map or its file; `TokenMap.of(texts)` makes one of transcripts as token
ids. Without it nothing is drafted, which is plain decoding. Exact, whatever the map says.
Reconstructed: the thresholds of the map.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.token_map import token_map
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=token_map,
    execution=Chain(Fixed(8)),
    verifier=Coupled(),
    options={"map": None},
    paper="Token Map Drafting, 2025",
    reconstructed="the thresholds of the map",
)
