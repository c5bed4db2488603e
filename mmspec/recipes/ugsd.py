"""UGSD: blocks of low entropy stay on the device, the others are verified by rank.

Xue et al. 2026, "Uncertainty-guided speculative decoding" of edge and cloud. The small model drafts
a block; if no entropy in it exceeds `tau_h` nats it is accepted unverified, and the target reads it
with the next block that is sent. A token of a sent block is accepted among the target's `ranks`
best; the first other one is replaced by the target's. Block length adapts to acceptance. The first
token is drafted, too: a text of low entropy never reaches the target. Lossy; greedy decoding with
ranks=1 and tau_h=-1 is exact, tau_h=inf is the small model alone. `unverified_tokens` and
`target_calls` measure what was sent; `mmspec.edge` runs the target on another machine.
Reconstructed: all constants, and how blocks adapt.
"""

from dataclasses import replace

from mmspec.draft import Drafter, Gate, Verifier
from mmspec.drafters.lengths.length import AcceptanceBand
from mmspec.drafters.neural.small_model import SMALL_MODEL, Autoregressive, small_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.verifiers.entropy_gate import EntropyGate
from mmspec.verifiers.rank_limit import RankLimit
from mmspec.verifiers.recursive import Recursive


def edge_model(kit: Kit) -> Drafter:
    """An independent small model that proposes the first token, too.

    Raises ValueError for one that does not get what the target encodes: what it is sure of is kept.
    """
    assert kit.drafter is not None
    if isinstance(kit.target, EncoderDecoder) and not isinstance(kit.drafter, EncoderDecoder):
        raise ValueError(
            f"a {type(kit.drafter.model).__name__} has no encoder and knows nothing of the source, "
            "but blocks that it is sure of are kept unread; give a small model with an encoder, or "
            "use whisper-assisted"
        )
    made = small_model(kit)
    assert isinstance(made, Autoregressive)
    return replace(made, drafts_first_token=True)


def rank(kit: Kit) -> Verifier:
    """The rule of what was sent."""
    return Recursive(RankLimit(kit.options["ranks"]))


def sure(kit: Kit) -> Gate:
    """What is not sent."""
    return EntropyGate(kit.options["tau_h"])


RECIPE = Recipe(
    architecture=edge_model,
    execution=Chain(AcceptanceBand()),
    verifier=Deferred(rank, "Recursive, within the ranks best"),
    gate=Deferred(sure, "blocks the drafter is sure of are kept"),
    options={"tau_h": 2.0, "ranks": 3},
    sees="auto",
    draft_model=(SMALL_MODEL,),
    paper="Xue et al. 2026",
    reconstructed="thresholds, ranks, and how blocks adapt",
)
