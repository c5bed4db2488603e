"""PaSS: a frozen target drafts for itself, with learned look-ahead tokens after its newest token.

Monea et al. 2023, "PaSS: parallel speculative sampling". One forward of the target over the newest
token and K look-ahead tokens (`mmspec.models.heads.lookahead_tokens.LookaheadTokens`) drafts K + 1
tokens, and a second one verifies them by rejection; a round yields at least two. Only the K vectors
are trained (`mmspec.training.lookahead_tokens.PASS`), so there is no draft model to store. Exact,
with any vectors. Reconstructed: trained on the target's distributions, from the embedding of the
least frequent token.
"""

from mmspec.drafters.neural.lookahead_tokens import LOOKAHEAD_TOKENS
from mmspec.drafters.neural.multi_token import SEES, multi_token_heads
from mmspec.drafters.parallel_chain import ParallelChain
from mmspec.recipe import Recipe
from mmspec.training.lookahead_tokens import PASS
from mmspec.verifiers.recursive import Recursive

RECIPE = Recipe(
    architecture=multi_token_heads,
    execution=ParallelChain(),
    verifier=Recursive(),
    optimisation="cross entropy of look-ahead embeddings against the target's distributions",
    sees=SEES,
    draft_model=(LOOKAHEAD_TOKENS,),
    training=PASS,
    paper="Monea et al. 2023",
    reconstructed="the loss; the initial embedding",
)
