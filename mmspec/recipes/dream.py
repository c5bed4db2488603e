"""DREAM: a head attends to the target's states and is trained on states of low attention entropy.

Hu et al. 2025, "DREAM: drafting with refined target features and entropy-adaptive cross-attention
fusion for multimodal speculative decoding". The drafter is a `mmspec.models.heads.dream.DreamHead`:
it reads token embeddings and cross-attends to the target's last states; of an image it reads the
half of the slots that the question attends to most in the target's last layer (`visual_keep`). The
tree has 31 nodes of 7 levels, 4 wide. Trained by `mmspec.training.dream.DREAM`, whose middle
regresses on the inputs of the early layer of least attention entropy, per token. Exact, with any
head. Reconstructed: unlike in the release, siblings of a tree do not attend to each other's states,
the first token attends to none, and images are pruned in training too; for targets of fewer than 8
layers the early layer is the second; coupled noise instead of rejection.
"""

from dataclasses import replace

import torch

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import state_head, with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.dream import DreamHead
from mmspec.training.dream import DREAM
from mmspec.verifiers.coupled import Coupled


@torch.no_grad()
def _open_gates(head: DreamHead, seed: int) -> None:
    """Open the gates of a random head, so that it attends to the target."""
    for name, weight in head.named_parameters():
        if name.endswith("_gate"):
            weight.fill_(1.0)


DREAM_HEAD = replace(state_head("DREAM head", DreamHead), fill=_open_gates)

RECIPE = with_head(
    DynamicTree(depth=7, beam=4, nodes=31, kinds=(Kind.DET,)),
    Coupled(),
    DREAM_HEAD,
    optimisation="regression on the target's states, and on those of its narrowest early layers",
    training=DREAM,
    needs=("image input",),
    paper="Hu et al. 2025",
    reconstructed="masks; thinned pictures in training; shallow targets; coupled noise",
)
