"""Sparrow: a feature head drafts on text alone; the target's states have the clip in them.

Zhang et al. 2026 (arXiv 2602.15318). Behind some layer the states of text have taken in what the
visual tokens say, so a head that reuses them (EAGLE's) needs no slot of a visual token: its memory
and its time do not grow with the clip, and text keeps its positions. Exact, with any head; verified
with coupled noise. Of the paper this is the inference (hidden-state reuse, text-anchored window):
training by intermediate visual states and several tokens at once is not here, heads come from
`mmspec.training.heads.EAGLE`. Reconstructed: original positions, the last states.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import FEATURE_HEAD, text_anchored_head
from mmspec.drafters.neural.multi_token import SEES
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
