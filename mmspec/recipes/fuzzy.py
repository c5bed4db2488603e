"""Fuzzy speculative decoding: a position is accepted where target and drafter are alike.

Holsman et al. 2025. `divergence` is "js" (Jensen-Shannon), "kl" (KL(q || p)) or "tv", in nats;
positions up to `threshold` keep the draft, others are sampled from p, as in the authors' code. The
output is q there and p elsewhere, and runs report TV(p, q) of the kept positions. Lossy;
threshold=-1 is plain decoding.
"""

from mmspec.draft import Verifier
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.fuzzy import Fuzzy
from mmspec.verifiers.recursive import Recursive


def build_fuzzy(kit: Kit) -> Verifier:
    """The rule of this kit. Raises ValueError for unknown divergences."""
    return Recursive(Fuzzy(kit.options["threshold"], kit.options["divergence"]))


RECIPE = with_draft_model(
    execution=Chain(Fixed(5)),
    verifier=Deferred(build_fuzzy, "Recursive, positions of low divergence"),
    options={"divergence": "js", "threshold": 0.4},
    paper="Holsman et al. 2025",
)
