"""Spec-LLaVA: a tree of what a small vision-language model is confident of.

Huo et al. 2025, "Spec-LLaVA". Children are drafted that are likely enough beside the best of their
siblings (structural pruning), and the likeliest nodes of all are verified (budget pruning). Exact.
Reconstructed: a tenth of the best child's chance, 32 nodes and 8 levels; verified with coupled
noise, where the paper takes the deepest path that matches. Its small models are distilled from the
target's distributions on its own answers.
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
