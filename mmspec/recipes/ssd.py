"""SSD: a small codec model drafts speech, and the target accepts with a tolerance.

Lin et al. 2025 (Interspeech), "Accelerating autoregressive speech synthesis inference with speech
speculative decoding". Accept with min(1, min(1, p/q) + beta), correct from norm((p - q)+). Lossy: a
step is off by the sum of min(beta q, (q - p)+), at most `beta`, which runs report as
`over_accepted_mass`; beta=0 is speculative sampling, exact. Greedy decoding is relaxed as well. The
end of speech and other control ids of the model's configuration, and those in `control`, are
verified exactly: tolerance would let a draft end early. Reconstructed: draft length and beta, the
correction, and the control ids.
"""

from mmspec.draft import Verifier
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Kit
from mmspec.targets.tokens.context import control_ids
from mmspec.verifiers.additive_tolerance import AdditiveTolerance
from mmspec.verifiers.recursive import Recursive


def tolerance(kit: Kit) -> Verifier:
    """The rule with the control ids of this model."""
    exempt = control_ids(kit.target) | set(kit.options["control"])
    return Recursive(AdditiveTolerance(kit.options["beta"], tuple(sorted(exempt))))


RECIPE = with_draft_model(
    execution=Chain(Fixed(3)),
    verifier=Deferred(tolerance, "Recursive, additive tolerance beta"),
    options={"beta": 0.1, "control": ()},
    paper="Lin et al. 2025",
    reconstructed="draft length, beta, the correction, which ids are exempt",
)
