"""BiLD: a small model drafts while it is sure, the large one rolls back what it finds improbable.

Kim et al. 2023. The small model stops before a token where no probability reaches 0.6 (alpha_FB;
another with `length=`), and the large model emits it; a drafted token with -log p above `rollback`
nats (alpha_RB) is replaced. The defaults are those of the code. Lossy; runs report the bias.
"""

from mmspec.draft import Verifier
from mmspec.drafters.lengths.length import Confidence
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.rollback import Rollback


def build_rollback(kit: Kit) -> Verifier:
    """The rule with the limit of this kit."""
    return Recursive(Rollback(kit.options["rollback"]))


RECIPE = with_draft_model(
    execution=Chain(Confidence(threshold=0.6, max_length=10)),
    verifier=Deferred(build_rollback, "Recursive, tokens up to a surprise of rollback nats"),
    options={"rollback": 5.0},
    paper="Kim et al. 2023",
    reconstructed="at most 10 tokens per draft",
)
