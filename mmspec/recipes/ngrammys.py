"""N-Grammys: continuations from the text, and from the model's own table of next tokens.

Stewart et al. 2024, "The N-Grammys: accelerating autoregressive inference with learning-free
batched speculation". `table` is a `BigramTable` of mmspec.drafters.lookup.bigram_table or its file:
`BigramTable.of(model)` reads every token of the vocabulary once. Each of the `width` best tokens
after the last one starts a branch, beside the copy from the text. What follows comes from stores in
the order of trust: the text, then a `datastore` as in `rest`, then the table, token by token.
Without them it copies from the text alone. Exact, with any stores; no draft model. Reconstructed:
branches share prefixes in one tree, where the paper verifies a batch of sequences; a branch is 6
tokens after its guess; the datastore is of hierarchical drafting.
"""

from mmspec.drafters.lookup.bigram_table import branches_of_table
from mmspec.drafters.lookup.retrieved_tree import RetrievedTree
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=branches_of_table,
    execution=RetrievedTree(nodes=48),
    verifier=Coupled(),
    options={
        "table": None,
        "datastore": None,
        "width": 8,
        "length_of_branch": 6,
        "longest": 3,
    },
    least={"width": 1, "length_of_branch": 1, "longest": 1},
    paper="Stewart et al. 2024",
    reconstructed="one tree in place of a batch; the sizes; a datastore between text and table",
)
