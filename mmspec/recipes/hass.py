"""HASS: EAGLE-2's head, taught on its own states and on the target's likeliest tokens.

Zhang et al. 2024, "Learning harmonized representations for speculative sampling". Head, tree and
verification are those of `eagle-2`; what differs is the training
(`mmspec.training.self_fed.HASS`): three passes over a lesson, in which later ones read what
the head itself said before, each with EAGLE's loss and a cross entropy over the 10 tokens that the
target finds likeliest. Exact. Reconstructed: verified with coupled noise, as in `eagle-2`.
"""

from mmspec.draft import Kind
from mmspec.drafters.dynamic_tree import DynamicTree
from mmspec.drafters.neural.feature_head import with_head
from mmspec.training.self_fed import HASS
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    DynamicTree(depth=6, beam=10, nodes=59, kinds=(Kind.DET,)),
    Coupled(),
    optimisation="regression on the target's states from its own; likeliest tokens",
    training=HASS,
    paper="Zhang et al. 2024",
    reconstructed="coupled noise instead of rejection",
)
