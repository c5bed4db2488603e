"""SpecDec: accept tokens among the target's best and not much less likely than its best.

Xia et al. 2023, the verification rule: rank at most `ranks` (beta, 3 to 5) and a log-probability
within `gap` nats (tau, 1 to 5) of the best. Their drafter, an encoder-decoder that fills masked
slots, is trained with the target; here any draft model or head drafts. Lossy; ranks=1 is greedy
decoding, and runs report the bias.
"""

from mmspec.draft import Verifier
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.rank_gap import RankGap
from mmspec.verifiers.recursive import Recursive


def build_rank_gap(kit: Kit) -> Verifier:
    """The rule with the settings of this kit."""
    return Recursive(RankGap(kit.options["ranks"], kit.options["gap"]))


RECIPE = with_draft_model(
    execution=Chain(Fixed(5)),
    verifier=Deferred(build_rank_gap, "Recursive, within a rank and a gap of the best token"),
    options={"ranks": 3, "gap": 1.0},
    paper="Xia et al. 2023",
    reconstructed="any drafter in place of theirs",
)
