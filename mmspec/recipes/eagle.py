"""EAGLE: one layer on top of the target's hidden states drafts a static tree.

Li et al. 2024, "EAGLE: speculative sampling requires rethinking feature uncertainty". The drafter
is a `mmspec.models.heads.feature_head.FeatureHead`, trained for this target by
`mmspec.training.learn_head`: it continues the target's last hidden states and speaks through the
target's embedding table and output head. Siblings are drawn without replacement and verified by
recursive rejection, on the published tree of 25 nodes. Exact in law. Under guidance the head reads
both branches and its logits are guided like the target's.
"""

from mmspec.draft import Kind
from mmspec.drafters.growth import StaticTree
from mmspec.drafters.neural.feature_head import FEATURE_HEAD, feature_head
from mmspec.recipe import Recipe
from mmspec.trees import Tree
from mmspec.verifiers.recursive import Recursive

RANKS = (  # which child to take at every step down
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)

RECIPE = Recipe(
    architecture=feature_head,
    execution=StaticTree(
        Tree.of_ranks([[int(rank) for rank in path] for path in RANKS.split()]), kinds=(Kind.WOR,)
    ),
    verifier=Recursive(),
    optimisation="regression on the target's states",
    sees="target-states",
    draft_model=(FEATURE_HEAD,),
    paper="Li et al. 2024",
)
