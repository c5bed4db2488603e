"""Speech-LLaMA with multi-token prediction: heads draft, the next forward of the target verifies.

Raj et al. 2024, "Faster speech-LLaMA inference with multi-token prediction", verification mode. A
language model that hears says its own next token, heads on the same state say the ones behind it;
the next forward reads them all, keeps those that the target would have said, and its last state
drafts again: no forward more than without heads. Exact: with greedy decoding the output is the
target's own. Recipe `speech-llama-mtp-threshold` keeps what heads are sure of instead.

Reconstructed: heads are `mmspec.models.heads.multi_token.MultiTokenHeads`, residual blocks in front
of the target's output head, trained beside a frozen target
(`mmspec.training.multi_token.MULTI_TOKEN`); sampled tokens are coupled.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.multi_token import MULTI_TOKEN_HEADS, SEES, multi_token_heads
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=multi_token_heads,
    execution=Chain(Fixed(3)),
    verifier=Coupled(),
    optimisation="cross entropy of every head",
    sees=SEES,
    draft_model=(MULTI_TOKEN_HEADS,),
    paper="Raj et al. 2024",
    reconstructed="the form of the heads, trained beside a frozen target; coupled sampling",
)
