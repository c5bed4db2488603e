"""SpecVLM: EAGLE-2's head, with a gate that chooses the image compression by the question.

Huang et al. 2025, "SpecVLM: fast speculative decoding in vision-language models". The drafter is a
`mmspec.drafters.neural.elastic_head.ElasticHead`: its first attention has a norm in front, and its
image input is pruned, pooled, convolved, resampled or left out, selected by the mean embedding of
the question. Trained by `mmspec.training.elastic.SPECVLM` on states and distributions that the
target computes online. Exact, with any head and gate. Reconstructed: the gate's form, all ratios,
that branches compress the head's inputs rather than embeddings, the gate's training, the weights of
the loss; the tree is that of `eagle-2`, verified with coupled noise. The paper of the same name
about videos is `specvlm-video`.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.elastic_head import ELASTIC_HEAD
from mmspec.drafters.neural.feature_head import with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.training.elastic import SPECVLM
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    DynamicTree(depth=6, beam=10, nodes=59, kinds=(Kind.DET,)),
    Coupled(),
    ELASTIC_HEAD,
    optimisation="regression on the target's states and distributions; a gate over branches",
    training=SPECVLM,
    needs=("image input",),
    paper="Huang et al. 2025",
    reconstructed="gate and its training, ratios, loss weights, tree; coupled noise",
)
