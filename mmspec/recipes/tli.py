"""TLI: a draft model of another vocabulary drafts from the tokens that both have.

Timor et al. 2025 ("Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies", token-level intersection): q is normalised on the shared tokens.
Exact in distribution. With a draft model of the same vocabulary it is `speculative-sampling`;
`coupled` and other recipes with a draft model take such models the same way.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.shared_tokens import ANY_VOCABULARY
from mmspec.drafters.neural.small_model import small_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.recursive import Recursive

RECIPE = Recipe(
    architecture=small_model,
    execution=Chain(Fixed(5)),
    verifier=Recursive(),
    sees="auto",
    draft_model=(ANY_VOCABULARY,),
    paper="Timor et al. 2025",
)
