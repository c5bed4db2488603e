"""SuffixDecoding: the likeliest branches after the last tokens, in the text and in earlier outputs.

Oliaro et al. 2024. A suffix tree of the prompt and the output of a request, and with `memory` one
of the outputs of earlier requests: a `SuffixMemory` of mmspec.drafters.lookup.suffix_tree, which is
bounded, shared by threads, saved and cleared, or its file; off by default. A match of m tokens
allows `factor` x m nodes whose share on their path is at least `floor`. Exact, with any memory.
"""

from mmspec.drafters.lookup.retrieved_tree import RetrievedTree
from mmspec.drafters.lookup.suffix_decoding import suffix_decoding
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=suffix_decoding,
    execution=RetrievedTree(nodes=32),
    verifier=Coupled(),
    options={"memory": None, "factor": 2.0, "floor": 0.1},
    paper="Oliaro et al. 2024",
)
