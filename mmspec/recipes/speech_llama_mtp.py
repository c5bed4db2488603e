"""Speech-LLaMA with multi-token prediction: heads draft, the next forward of the target verifies.

Raj et al. 2024, "Faster speech-LLaMA inference with multi-token prediction", verification mode. A
language model with audio input predicts the next token, heads on the same state the following ones;
the next forward verifies them all, and its last state drafts again, so heads add no forwards.
Exact: with greedy decoding the output is the target's own. Recipe `speech-llama-mtp-threshold`
accepts by the heads' confidence instead.

Reconstructed: heads are `mmspec.models.heads.multi_token.MultiTokenHeads`, residual blocks in front
of the target's output head, trained on a frozen target (`mmspec.training.multi_token.MULTI_TOKEN`);
sampled tokens are coupled.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.multi_token import MULTI_TOKEN_HEADS, SEES, multi_token_heads
from mmspec.drafters.shapes import Chain
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
