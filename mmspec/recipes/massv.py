"""MASSV: a small language model drafts through the target's vision encoder and a projector.

Ganesan et al. 2025, "MASSV: multimodal adaptation and self-data distillation for speculative
decoding of VLMs". The image is encoded once, by the target; image tokens keep their slots, so the
drafter of an M-RoPE target uses plain positions. `drafter` is a folder that `mmspec train massv`
wrote, or a model with `projector=`; one with a vision encoder of its own and the target's width
reads the target's projected features. Exact; verified with coupled noise here, where the paper uses
speculative sampling.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.massv import PROJECTED, massv_model
from mmspec.drafters.shapes import Chain
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
    needs=("image input",),
    paper="Ganesan et al. 2025",
    training=MASSV,
    reconstructed="projected features where the encoder has several per image token; rates and "
    "shares of the two stages of training",
)
