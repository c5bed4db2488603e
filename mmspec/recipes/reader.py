"""READER: retrieved continuations below the target's own candidates for the next token.

READER, 2025. Of the last forward that read the same token, the `width` best next tokens become the
first level of a tree, and each is followed by what came after it in the text. Exact; no draft
model. Reconstructed from the abstract: the target's stored candidates are the heuristic tree, and
the memory plan for large batches is left out.
"""

from mmspec.drafters.lookup.branches import branches_of_candidates
from mmspec.drafters.lookup.retrieved_tree import RetrievedTree
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=branches_of_candidates,
    execution=RetrievedTree(nodes=48),
    verifier=Coupled(),
    options={"width": 8, "length_of_branch": 6, "longest": 3},
    least={"width": 1, "length_of_branch": 1, "longest": 1},
    paper="READER, 2025",
    reconstructed="the first level of the tree, and all sizes",
)
