"""Hydra: Medusa's heads in sequence, each of which hears the tokens drafted before it.

Ankner et al. 2024, "Hydra: sequentially-dependent draft heads for Medusa decoding". The drafter is
`mmspec.models.heads.hydra.HydraHeads`, trained beside a frozen target by
`mmspec.training.ahead.HYDRA`. Exact: greedy and sampled output is plain decoding's; recipe
`typical` verifies these heads by the paper's own rule for sampling, which is lossy. Reconstructed:
the tree, which is Medusa's of 63 nodes; coupled noise for sampling.
"""

from mmspec.drafters.growth import StaticTree
from mmspec.drafters.neural.hydra import HYDRA_HEADS
from mmspec.drafters.neural.multi_token import SEES, multi_token_heads
from mmspec.recipe import Recipe
from mmspec.recipes.medusa import TREE
from mmspec.training.ahead import HYDRA
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=multi_token_heads,
    execution=StaticTree(TREE),
    verifier=Coupled(),
    optimisation="cross entropy of every head",
    sees=SEES,
    draft_model=(HYDRA_HEADS,),
    training=HYDRA,
    paper="Ankner et al. 2024",
    reconstructed="the tree; coupled sampling",
)
