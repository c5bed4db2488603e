"""SpecVLM: EAGLE-2's head, for which a gate chooses by the question how pictures are thinned.

Huang et al. 2025, "SpecVLM: fast speculative decoding in vision-language models". The drafter is a
`mmspec.drafters.neural.elastic_head.ElasticHead`: its first attention has a norm in front, and what
it reads of a picture is pruned, pooled, convolved, resampled or left out, as the mean embedding of
the question says. Trained by `mmspec.training.elastic.SPECVLM` on states and distributions that the
target gives meanwhile. Exact, with any head and gate. Reconstructed: the gate's form, all ratios,
that branches work on what the head reads rather than on embeddings, how the gate is trained, the
weights of the loss; the tree is that of `eagle-2`, verified with coupled noise. The paper of the
same name about videos is `specvlm-video`.
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
    optimisation="regression on the target's states and distributions, online; a gate over branches",
    training=SPECVLM,
    paper="Huang et al. 2025",
    reconstructed="gate and its training, ratios, loss weights, tree; coupled noise",
)
