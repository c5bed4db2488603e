"""Token map: a table of frequent continuations, built from transcripts of a domain.

Token Map Drafting 2025 (arXiv 2507.21522). `map` is a `TokenMap` of
mmspec.drafters.lookup.token_map or its file; `TokenMap.of(texts)` builds one from transcripts as
token ids. Without it nothing is drafted, which is plain decoding. Exact, with any map.
Reconstructed: the thresholds of the map.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.token_map import token_map
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=token_map,
    execution=Chain(Fixed(8)),
    verifier=Coupled(),
    options={"map": None},
    idle_without="map",
    paper="Token Map Drafting, 2025",
    reconstructed="the thresholds of the map",
)
