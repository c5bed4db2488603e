"""EdgeSD: a small model on merged visual tokens drafts a tree of shortest paths.

Huang et al. 2026 (IEEE TMC). Nodes are expanded by distance in nats, all of one bucket by one
forward (delta-stepping). Similar visual tokens are merged before the draft model reads them. Exact:
the target reads the whole image, where the paper's cloud reads merged tokens too. Reconstructed:
buckets of half a nat, 32 nodes, half of the tokens merged; verified with coupled noise. Both models
run in one process. Drafters without image input draft without it.
"""

from mmspec.compressors.bipartite_merge import BipartiteMerge
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.drafters.trees.best_first import BestFirstTree
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=small_model,
    execution=BestFirstTree(nodes=32, depth=8, step=0.5),
    verifier=Coupled(),
    optimisation="similar visual tokens merged",
    compressor=BipartiteMerge(),
    sees="auto",
    draft_model=(SMALL_MODEL,),
    paper="Huang et al. 2026",
    reconstructed="bucket, sizes and share merged; coupled noise; a target that reads all",
)
