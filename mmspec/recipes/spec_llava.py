"""Spec-LLaVA: a small vision-language model drafts a tree by confidence.

Huo et al. 2025, "Spec-LLaVA". Children are kept relative to the probability of their best sibling
(structural pruning), and the likeliest nodes are verified (budget pruning). Exact. Reconstructed: a
tenth of the best child's probability, 32 nodes and 8 levels; verified with coupled noise, where the
paper takes the deepest path that matches. Its small models are distilled from the target's
distributions on its own answers.
"""

import math

from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.trees.best_first import BestFirstTree
from mmspec.verifiers.coupled import Coupled

RECIPE = with_draft_model(
    BestFirstTree(nodes=32, depth=8, step=math.inf, threshold=0.1),
    Coupled(),
    optimisation="distilled on the target's answers",
    paper="Huo et al. 2025",
    reconstructed="threshold, sizes; coupled noise",
)
