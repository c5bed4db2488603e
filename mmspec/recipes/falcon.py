"""Falcon: a semi-autoregressive head, an LSTM with one layer, drafts a tree block by block.

Gao et al. 2024, "Falcon: faster and parallel inference of large language models through enhanced
semi-autoregressive drafting and custom-designed decoding tree". The head
(`mmspec.models.heads.falcon.FalconHead`) predicts K tokens per run, 3 by default, and a second run
continues after them; it is trained by coupled sequential glancing distillation
(`mmspec.training.falcon.FALCON`). Exact, with any head. Reconstructed: how slots predict K tokens;
the loss of the first pass and the share of glances; the tree, which is EAGLE-2's in two blocks;
coupled noise for sampling.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.falcon import FALCON_HEAD, falcon_head
from mmspec.drafters.neural.feature_head import with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.training.falcon import FALCON
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    DynamicTree(depth=6, beam=10, nodes=59, kinds=(Kind.DET,)),
    Coupled(),
    FALCON_HEAD,
    architecture=falcon_head,
    optimisation="coupled sequential glancing distillation of states and distributions",
    training=FALCON,
    paper="Gao et al. 2024",
    reconstructed="slots of a block; weights of the loss; the tree; coupled sampling",
)
