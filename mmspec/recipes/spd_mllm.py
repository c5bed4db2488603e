"""SPD-MLLM: a text-only language model drafts for a vision-language model.

It does not read the image.

Gagrani et al. 2024, "On speculative decoding for multimodal large language models". The drafter's
prompt is the chat text without placeholder and frame tokens, its positions start at 0. Exact;
verified with coupled noise, where the paper uses speculative sampling (`verifier="rejection"` gives
that).
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.training.small_model import TEXT_ONLY
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=small_model,
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    optimisation="fine-tuned as a language model",
    sees="nothing",
    draft_model=(SMALL_MODEL,),
    training=TEXT_ONLY,
    paper="Gagrani et al. 2024",
)
