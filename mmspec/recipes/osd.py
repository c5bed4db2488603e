"""OSD: a draft model that learns from its refused tokens while it serves.

Liu et al. 2024, "Online speculative decoding". Where the target refuses a token its distribution is
kept; when a request ends, one step of distillation, KL(p || q), is made on these tokens every
`every` requests, at the learning rate `rate`. The weights are frozen within a request. Exact: the
draft model changes, the target's output does not. The draft model that was given is trained in
place; `save_pretrained` writes it as it is then, and a saved folder resumes from there, with a new
optimiser. Reconstructed: one step per update; verified with coupled noise.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.online import online_model
from mmspec.drafters.neural.small_model import SMALL_MODEL
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=online_model,
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    sees="auto",
    draft_model=(SMALL_MODEL,),
    options={"every": 1, "rate": 1e-4},
    optimisation="online distillation on refused tokens",
    paper="Liu et al. 2024",
    reconstructed="one step per update; coupled noise",
)
