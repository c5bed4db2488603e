"""Whisper assisted: a small decoder drafts from the encoder states of the target.

Gandhi et al. 2023 (Distil-Whisper, arXiv 2311.00430). `drafter` is a decoder alone
(`WhisperForCausalLM`), a whole model whose encoder has the target's weights, or any other draft
model; the first two are handed the target's encoder states, so a sound is encoded once. Exact.
transformers' own assistance takes one row at a time and no fall-back of temperatures; this takes
both. Drafts end where the best token has less than 0.4, as they do there, and with the text; they
are up to 64 tokens long, so that what a sure draft model says of one sentence is read at once.
"""

from mmspec.drafters.neural.shared_encoder import SHARED_ENCODER, ending
from mmspec.drafters.recycled import Recycled
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=ending,
    execution=Recycled(most=64, window=None),
    verifier=Coupled(),
    sees="auto",
    draft_model=(SHARED_ENCODER,),
    paper="Gandhi et al. 2023",
)
