"""Spec-VLA: a feature head drafts the action, accepted within a few bins of the target.

Wang et al. 2025, "Spec-VLA: speculative decoding for vision-language-action models with relaxed
acceptance". The dynamic tree of EAGLE-2 (49 nodes, 5 levels, beams of 8) over the policy's states;
a drafted bin is accepted within `radius` of the target's own, 9 in the paper. Lossy; `radius=0` is
exact and strict EAGLE-2. `radii` gives one for each component or group, `metric` "physical"
measures in the robot's units, `strict` names components that must be equal, `keep` "target" outputs
the target's token instead of the accepted one. Unlike the published code the gripper is strict
unless `strict=[]`, only action tokens are accepted, and of equally long paths the closest one is
kept. Reconstructed: sampling (the radius is around the sample).
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.recipe import Deferred
from mmspec.verifiers.action_tolerance import KINDS, OPTIONS, build_tolerance

RECIPE = with_head(
    DynamicTree(depth=5, beam=8, nodes=49, kinds=(Kind.DET,)),
    Deferred(build_tolerance, "longest path within a radius of bins", kinds=KINDS),
    options=OPTIONS,
    needs=("action space",),
    paper="Wang et al. 2025",
    reconstructed="tolerance when sampling",
    decodes="actions",
)
