"""Amphista: heads that attend to each other, on adapted states of the target, fill a static tree.

Li et al. 2024, "Amphista: bi-directional multi-head decoding for accelerating LLM inference". The
drafter is `mmspec.models.heads.amphista.AmphistaHead`, trained on a frozen target by
`mmspec.training.amphista.AMPHISTA`. A whole tree costs one run of two layers and of the K heads:
its distributions are independent of drafted tokens, as in `medusa`. Exact, with any head: greedy
and sampled output is plain decoding's. Reconstructed: the tree, which is Medusa's of 63 nodes; the
output head, which is the target's; a loss against distributions; coupled noise for sampling.
"""

from mmspec.drafters.neural.amphista import AMPHISTA_HEAD
from mmspec.drafters.neural.feature_head import with_head
from mmspec.drafters.shapes import StaticTree
from mmspec.recipes.medusa import TREE
from mmspec.training.amphista import AMPHISTA
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    StaticTree(TREE),
    Coupled(),
    AMPHISTA_HEAD,
    optimisation="cross entropy of every head against the target's distributions",
    training=AMPHISTA,
    paper="Li et al. 2024",
    reconstructed="the tree; the output head; the loss; coupled sampling",
)
