"""Mixture of Attentions: a head over layers, text and states, on-policy, drafts a dynamic tree.

Zimmer et al. 2024, "Mixture of attentions for speculative decoding". Attention over the layers of
each token sees more of the target than its last state does, and drafted tokens attend across to
the states of what the target has read, never to states of the head's own. The drafter is
`mmspec.models.heads.mixture_of_attentions.MixtureOfAttentions`, trained by
`mmspec.training.mixture_of_attentions.MIXTURE`. Exact, with any head. Left out: the target's last
layers after the head. Reconstructed: which states; the tree, which is EAGLE-2's; coupled noise for
sampling.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import state_head, with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.mixture_of_attentions import MixtureOfAttentions
from mmspec.training.mixture_of_attentions import MIXTURE
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    DynamicTree(depth=6, beam=10, nodes=59, kinds=(Kind.DET,)),
    Coupled(),
    state_head("Mixture of Attentions", MixtureOfAttentions),
    optimisation="cross entropy against the target's distributions, several steps ahead",
    training=MIXTURE,
    paper="Zimmer et al. 2024",
    reconstructed="which states; none of the target's layers; the tree; coupled sampling",
)
