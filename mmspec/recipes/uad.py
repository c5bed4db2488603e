"""UAD: a draft model of any tokenizer; its text is encoded again with the target's.

Timor et al. 2025 ("Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies", string-level exact match), the universal assisted generation of
transformers. The draft model reads no image. Exact. Where both tokenizers share their tokens,
recipes that draft from these (`tli`, `coupled`) accept more when sampling.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.reencoded import REENCODED, reencoded
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=reencoded,
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    draft_model=(REENCODED,),
    paper="Timor et al. 2025",
)
