"""Consultant decoding: accept tokens whose surprise under the target is within a threshold.

Consultant decoding (2025): -log p(x) <= `surprise` nats, which is a floor exp(-surprise) on p(x).
Corrections come from p. Lossy; a surprise below log 2 is exact for greedy decoding. Reconstructed:
the default threshold.
"""

import math

from mmspec.draft import Verifier
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.errors import check_number
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.likelihood_floor import LikelihoodFloor
from mmspec.verifiers.recursive import Recursive


def build_floor(kit: Kit) -> Verifier:
    """The floor of this kit. Raises ValueError for a negative surprise."""
    check_number("surprise", kit.options["surprise"], 0, example=2.3)
    return Recursive(LikelihoodFloor(math.exp(-kit.options["surprise"])))


RECIPE = with_draft_model(
    execution=Chain(Fixed(5)),
    verifier=Deferred(build_floor, "Recursive, tokens up to a surprise in nats"),
    options={"surprise": 2.3},
    paper="Consultant decoding, 2025",
    reconstructed="the default threshold",
)
