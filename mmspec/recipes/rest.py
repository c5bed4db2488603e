"""REST: the continuation of the longest suffix of the text that occurs in a datastore of texts.

He et al. 2024 (arXiv 2311.08252). `datastore` is a `Datastore` of
mmspec.drafters.lookup.datastore or its file; `Datastore.of(texts)` sorts texts as token ids.
Without it nothing is drafted, which is plain decoding. Exact, with any datastore. Reconstructed: a
chain of the most frequent tokens in place of the paper's tree, and that suffixes of one token do
not count.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.rest import rest
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=rest,
    execution=Chain(Fixed(10)),
    verifier=Coupled(),
    options={"datastore": None, "longest": 16, "shortest": 2},
    least={"longest": 1, "shortest": 1},
    idle_without="datastore",
    paper="He et al. 2024",
    reconstructed="a chain in place of a tree; suffixes of one token do not count",
)
