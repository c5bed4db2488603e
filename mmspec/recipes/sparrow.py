"""Sparrow: a feature head drafts on text alone; the target's states contain the clip.

Zhang et al. 2026 (arXiv 2602.15318). After some layer the states of text contain the visual
information, so a head on them (EAGLE's) needs no visual slots: its cache and time do not grow with
the clip, and text keeps its positions. Exact, with any head; verified with coupled noise. This is
the inference of the paper (hidden-state reuse, text-anchored window) without its training by
intermediate visual states and multi-token prediction; heads come from
`mmspec.training.heads.EAGLE`. Reconstructed: original positions, the last states.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import FEATURE_HEAD, text_anchored_head
from mmspec.drafters.neural.multi_token import SEES
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.training.heads import EAGLE
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=text_anchored_head,
    execution=Chain(Fixed(4)),
    verifier=Coupled(),
    optimisation="regression on the target's states; no visual slots",
    sees=SEES,
    draft_model=(FEATURE_HEAD,),
    training=EAGLE,
    paper="Zhang et al. 2026",
    reconstructed="original positions; which states; without its training",
)
