"""Whisper assisted: a small decoder drafts from the encoder states of the target.

Gandhi et al. 2023 (Distil-Whisper, arXiv 2311.00430). `drafter` is a decoder alone
(`WhisperForCausalLM`), a whole model whose encoder has the target's weights, or any other draft
model; the first two read the target's encoder states, so audio is encoded once. Exact.
transformers' own assistance takes one row and no temperature fallback; this recipe supports both.
Drafts end if the best token has less than 0.4, as there, and with the text; they are up to 64
tokens long, so that one forward verifies a whole sentence.
"""

from mmspec.drafters.neural.shared_encoder import SHARED_ENCODER, ending
from mmspec.drafters.recycling_chain import RecyclingChain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=ending,
    execution=RecyclingChain(max_length=64, window=None),
    verifier=Coupled(),
    sees="auto",
    draft_model=(SHARED_ENCODER,),
    needs=("speech encoder",),
    paper="Gandhi et al. 2023",
)
