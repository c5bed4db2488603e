"""Codec-MTP: heads predict several tokens, and the best path is accepted without verification.

Nguyen et al. 2025 (ICASSP), "Accelerating codec-based speech synthesis with multi-token prediction
and speculative decoding". Multi-token heads on the target's last state give the `k` likeliest
candidates of each of `n` - 1 positions; Viterbi chooses among their paths by the heads' scores and,
with weight `lam`, by bigram counts of the training data. Every forward keeps n tokens, and nothing
is verified. Lossy: `over_accepted_mass` measures the difference to the target, with tokens as point
masses. n=1 is plain decoding with the same seed; lam=0 takes each head's own choice. With
verifier="coupled" the block is only a draft, and the output is exact.

Reconstructed: the score of a path, and that the first token of a block is the target's own choice,
as in plain decoding, where the search starts. The bigram table is additively smoothed. Sampled
scores include the noise of their positions.
"""

from mmspec.drafters.neural.multi_token import MULTI_TOKEN_HEADS, SEES
from mmspec.drafters.neural.viterbi_block import BlockShape, viterbi_block
from mmspec.recipe import Recipe
from mmspec.verifiers.unchecked import Unchecked

RECIPE = Recipe(
    architecture=viterbi_block,
    execution=BlockShape(),
    verifier=Unchecked(),
    optimisation="cross entropy of every head",
    sees=SEES,
    draft_model=(MULTI_TOKEN_HEADS,),
    options={"n": 4, "k": 8, "lam": 1.0},
    needs=("speech tokens",),
    paper="Nguyen et al. 2025 (Codec-MTP)",
    reconstructed="the score of a path, the first token of a block, n, k and lam",
)
