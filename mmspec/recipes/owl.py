"""OWL: an LSTM on the target's last state alone drafts a dynamic tree, at one cost for any context.

Lee et al. 2025, "OWL: overcoming window length-dependence in speculative decoding for long-context
inputs". The drafter is `mmspec.models.heads.owl.OwlHead`, trained on a frozen target by
`mmspec.training.owl.OWL`: it caches nothing and attends to nothing, so it drafts after a context of
any length as it does after a short one. Exact, with any head. Reconstructed: sizes, and the tree,
which is EAGLE-2's; coupled noise for sampling. Left out: the [SPEC] token in the verifier, and the
paper's choice between this tree and suffix decoding (`suffix`) in every round.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.multi_token import SEES, multi_token_heads
from mmspec.drafters.neural.owl import OWL_HEAD
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.recipe import Recipe
from mmspec.training.owl import OWL
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=multi_token_heads,
    execution=DynamicTree(depth=6, beam=10, nodes=59, kinds=(Kind.DET,)),
    verifier=Coupled(),
    optimisation="cross entropy against the target's distributions over several steps",
    sees=SEES,
    draft_model=(OWL_HEAD,),
    training=OWL,
    paper="Lee et al. 2025",
    reconstructed="sizes; the tree; no [SPEC] token; coupled sampling",
)
