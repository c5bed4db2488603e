"""DREAM: a head attends to the target's states, and is taught those of its least scattered layers.

Hu et al. 2025, "DREAM: drafting with refined target features and entropy-adaptive cross-attention
fusion for multimodal speculative decoding". The drafter is a
`mmspec.models.heads.dream.DreamHead`: embeddings of tokens go in, the target's last states are
attended to in its middle; it reads the half of a picture's slots that the question attends to most
in the target's last layer (`visual_keep`). The tree has 31 nodes of 7 levels, 4 wide. Trained by
`mmspec.training.dream.DREAM`, with the middle at the states that enter the early layer of
least attention entropy, token by token. Exact, with any head. Reconstructed: siblings of a tree do
not hear each other's states and the first token hears none, unlike in the release; pictures are
thinned in training too, by what the question attends to, and in the release by no one; for targets
of fewer than 8 layers the early layer is the second; coupled noise in the place of rejection.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.dream import DREAM_HEAD
from mmspec.drafters.neural.feature_head import with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.training.dream import DREAM
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    DynamicTree(depth=7, beam=4, nodes=31, kinds=(Kind.DET,)),
    Coupled(),
    DREAM_HEAD,
    optimisation="regression on the target's states, and on those of its narrowest early layers",
    training=DREAM,
    paper="Hu et al. 2025",
    reconstructed="masks; thinned pictures in training; shallow targets; coupled noise",
)
