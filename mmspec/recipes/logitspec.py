"""LogitSpec: the runners-up of the last token are looked up in the text as next tokens.

LogitSpec, 2025. The logits that gave the last token often rank the token after it high as well, so
each of its `width` runners-up is a guess for the next token, followed by what came after it in the
text. Exact; no draft model.
"""

from mmspec.drafters.lookup.branches import branches_of_logits
from mmspec.drafters.lookup.retrieved_tree import RetrievedTree
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=branches_of_logits,
    execution=RetrievedTree(nodes=48),
    verifier=Coupled(),
    options={"width": 8, "length_of_branch": 6, "longest": 3},
    least={"width": 1, "length_of_branch": 1, "longest": 1},
    paper="LogitSpec, 2025",
    reconstructed="the sizes, and one tree in place of separate drafts",
)
