"""Cool-SD: relax acceptance more at the beginning of a draft than at its end.

Li et al. 2026, "Annealed relaxation of speculative decoding for faster autoregressive image
generation". Accept with min(1, w_i p/q), w_i = delta exp(-nu i - mu); corrections from norm((p -
q)+), which they prove optimal. The paper runs delta=1.1 (Lumina-mGPT) and 2 (LlamaGen). Lossy,
delta=1 is exact; runs report `over_accepted_mass`. `drafter` is a feature head, as in the paper
(EAGLE-1), or a draft model. Reconstructed: mu, which is not public, makes delta the mean weight,
and no weight is below 1.
"""

from mmspec.draft import Verifier
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.annealed import Annealed
from mmspec.verifiers.recursive import Recursive


def build_annealed(kit: Kit) -> Verifier:
    """The rule with the settings of this kit."""
    return Recursive(Annealed(kit.options["delta"], kit.options["nu"]))


RECIPE = with_draft_model(
    execution=Chain(Fixed(5)),
    verifier=Deferred(build_annealed, "Recursive, annealed by depth, delta in the mean"),
    options={"delta": 1.1, "nu": 0.7},
    paper="Li et al. 2026",
    reconstructed="the constant mu",
)
