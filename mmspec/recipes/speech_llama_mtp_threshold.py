"""Speech-LLaMA with multi-token prediction, unverified: heads are believed while they are sure.

Raj et al. 2024, threshold mode. Behind the target's own next token a head's token is kept as long
as the head's highest probability is at least `delta`; the first head that is less sure ends the
block, and the next forward begins behind it. Lossy: the target never judges what was kept, though
`over_accepted_mass` says how far it would have gone otherwise. delta > 1 is plain decoding; 0 keeps
every block whole. Recipe `speech-llama-mtp` verifies.

Reconstructed: delta, and the form of the heads.
"""

from mmspec.draft import Kind, Verifier
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.multi_token import MULTI_TOKEN_HEADS, SEES, multi_token_heads
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.verifiers.confidence_floor import ConfidenceFloor
from mmspec.verifiers.recursive import Recursive

KINDS = (Kind.IID,)  # carry the heads' distributions


def floor(kit: Kit) -> Verifier:
    """The rule with the confidence asked for."""
    return Recursive(ConfidenceFloor(kit.options["delta"]))


RECIPE = Recipe(
    architecture=multi_token_heads,
    execution=Chain(Fixed(3), KINDS),
    verifier=Deferred(floor, "Recursive, confidence floor delta", kinds=KINDS),
    optimisation="cross entropy of every head",
    sees=SEES,
    draft_model=(MULTI_TOKEN_HEADS,),
    options={"delta": 0.9},
    paper="Raj et al. 2024",
    reconstructed="delta, the form of the heads",
)
