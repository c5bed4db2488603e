"""Speech-LLaMA with multi-token prediction, unverified: accept heads by their confidence.

Raj et al. 2024, threshold mode. After the target's next token a head's token is accepted while the
head's highest probability is at least `delta`; the first head below ends the block. Lossy: the
target does not verify accepted tokens; `over_accepted_mass` measures the difference. delta > 1 is
plain decoding; 0 accepts every block. Recipe `speech-llama-mtp` verifies.

Reconstructed: delta, and the form of the heads.
"""

from mmspec.draft import Kind, Verifier
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.multi_token import MULTI_TOKEN_HEADS, SEES, multi_token_heads
from mmspec.drafters.shapes import Chain
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
