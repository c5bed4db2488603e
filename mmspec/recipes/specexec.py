"""SpecExec: a large tree of a small model's best paths, for targets whose weights are offloaded.

Svirschevski et al. 2024, "SpecExec: massively parallel speculative decoding for interactive LLM
inference on consumer devices". Where a forward of the target takes seconds, because its weights
come from the host or from disk, hundreds of nodes cost no more than one. The draft is a search for
the most probable paths, with probabilities of the draft model that are read once and kept; paths
less probable than exp(-10) are left out. The target scores the whole tree in one pass, and its own
sample is looked up in it. Exact. Reconstructed: 128 nodes and 16 levels, where the paper has up to
2048 nodes; nodes within a nat of the best one are expanded in one forward, where the paper expands
32 beams; no decay of deeper scores; the tree is grown anew each round.
"""

from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.trees.best_first import BestFirstTree
from mmspec.verifiers.coupled import Coupled

RECIPE = with_draft_model(
    BestFirstTree(nodes=128, depth=16, step=1.0, branch=16, farthest=10.0),
    Coupled(),
    paper="Svirschevski et al. 2024",
    reconstructed="sizes; a nat in place of 32 beams; no decay; trees are not reused",
)
