"""Ensemble: the output is a mixture of the target's and the drafter's distributions.

DIVERSE; `assistant_ensemble_weight` of transformers. Accept with 1 - w + w min(1, p/q), w =
`weight` the share of the target: exactly w p + (1 - w) q, (1 - w) TV(p, q) from the target. Lossy;
weight=1 is speculative sampling.
"""

from mmspec.draft import Verifier
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.ensemble import WeightedEnsemble
from mmspec.verifiers.recursive import Recursive


def build_ensemble(kit: Kit) -> Verifier:
    """The rule with the weight of this kit."""
    return Recursive(WeightedEnsemble(kit.options["weight"]))


RECIPE = with_draft_model(
    execution=Chain(Fixed(5)),
    verifier=Deferred(build_ensemble, "Recursive, mixture of both distributions"),
    options={"weight": 0.5},
    paper="DIVERSE, 2025",
    reconstructed="the draft length",
)
