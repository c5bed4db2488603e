"""MASSV: a small language model drafts through the target's vision encoder and a projector.

Ganesan et al. 2025, "MASSV: multimodal adaptation and self-data distillation for speculative
decoding of VLMs". The picture is encoded once, by the target; image tokens keep their slots, so
an M-RoPE target's drafter counts plain positions. `drafter` is a folder that `mmspec train massv`
wrote, or a model with `projector=`; one with eyes of its own and the target's width takes the
target's projected features. Exact; verified with coupled noise here, where the paper uses
speculative sampling.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.massv import PROJECTED, massv_model
from mmspec.recipe import Recipe
from mmspec.training.small_model import MASSV
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=massv_model,
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    optimisation="projector pre-training, then self-data distillation",
    sees="target-features",
    draft_model=(PROJECTED,),
    options={"projector": None},
    paper="Ganesan et al. 2025",
    training=MASSV,
    reconstructed="projected features where the encoder has several per image token; rates and "
    "shares of the two stages of training",
)
