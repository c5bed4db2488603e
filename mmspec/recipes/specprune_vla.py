"""SpecPrune-VLA, verified: the policy drafts on a pruned image and verifies on the whole image.

Wang et al. 2026 (arXiv 2509.05614) prune the image by attention of the previous step (global),
attention of an early layer (local) and motion (dynamic), with more tokens for fine motion; their
output is that of the pruned pass, unverified. Here that pass drafts and the unpruned policy
verifies. Exact, and therefore slower than plain decoding: every drafted token costs a step of the
policy, and only its prompt is shorter. It measures how often the pruned policy agrees. Left out:
pruning between later layers, and replanning within a chunk. Reconstructed: features are compared
instead of pixels.
"""

from mmspec.compressors.action_prune import ActionPrune
from mmspec.drafters.actions.pruned import pruned_policy
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=pruned_policy,
    execution=Chain(Fixed(64)),
    verifier=Coupled(),
    optimisation="global, local and dynamic tokens of the picture",
    compressor=ActionPrune(),
    sees="target-features",
    needs=("action space",),
    paper="Wang et al. 2026",
    reconstructed="features in the place of pixels; verification",
    decodes="actions",
)
