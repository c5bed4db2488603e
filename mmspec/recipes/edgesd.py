"""EdgeSD: a tree of shortest paths, by a small model that reads merged visual tokens.

Huang et al. 2026 (IEEE TMC). The nodes that lie nearest, in nats, keep most tokens; all that lie in
one bucket are expanded by one forward (delta-stepping). Visual tokens alike are merged before the
draft model reads them. Exact for the target that is given: it reads the picture whole here, where
the paper's cloud gets the merged tokens too. Reconstructed: buckets of half a nat, 32 nodes, a half
of the tokens merged; verified with coupled noise. Both models run in one process. Drafters that see
no picture draft without it.
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
