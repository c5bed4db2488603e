"""EAGLE-3: a head on three layers of the target, trained on its own states, drafts a dynamic tree.

Li et al. 2025, "EAGLE-3: scaling up inference acceleration of large language models via
training-time test". The drafter is a `mmspec.models.heads.eagle3.Eagle3Head` over hidden states 2,
L // 2 and L - 3 of the target, counted as in Hugging Face, with an output head of its own over
frequent tokens, trained by `mmspec.training.self_fed.EAGLE3`. Every level expands the 10 likeliest
paths, and the 59 likeliest nodes of 8 levels are verified as deterministic candidates. Exact, with
any head. Reconstructed: verified with coupled noise, as in `eagle-2`.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import EAGLE3_HEAD, with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.training.self_fed import EAGLE3
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    DynamicTree(depth=8, beam=10, nodes=59, kinds=(Kind.DET,)),
    Coupled(),
    EAGLE3_HEAD,
    optimisation="cross entropy on its own states (training-time test)",
    training=EAGLE3,
    paper="Li et al. 2025",
    reconstructed="coupled noise instead of rejection",
)
