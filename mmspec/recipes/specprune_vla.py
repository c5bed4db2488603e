"""SpecPrune-VLA, verified: the policy drafts on a pruned picture, and reads its draft on the whole.

Wang et al. 2026 (arXiv 2509.05614) prune the picture by what the policy attended to at the step
before (global), attends to in an early layer (local), and by what has moved (dynamic), with more
tokens where the robot works finely; its answer is that of the pruned pass, and there is no test.
Here that pass drafts and the unpruned policy verifies. Exact, and for that reason slower than plain
decoding: every drafted token costs a step of the policy, and only its prompt is shorter. What it
shows is how often the pruned policy says the same. Left out: pruning between later layers, and new
plans in the middle of a chunk. Reconstructed: features are compared in the place of pixels.
"""

from mmspec.compressors.action_prune import ActionPrune
from mmspec.drafters.actions.pruned import pruned_policy
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=pruned_policy,
    execution=Chain(Fixed(64)),
    verifier=Coupled(),
    optimisation="global, local and dynamic tokens of the picture",
    compressor=ActionPrune(),
    sees="target-features",
    paper="Wang et al. 2026",
    reconstructed="features in the place of pixels; verification",
    decodes="actions",
)
