"""CTC-drafter: slots over tokens and a blank are collapsed to the likeliest texts, a tree of them.

Wen et al. 2024, "Speculative decoding with CTC-based draft model for LLM inference acceleration".
One run of the head (`mmspec.models.heads.ctc_head.CtcHead`) fills K slots; prefix beam search keeps
the `beam` likeliest texts of the `width` likeliest tokens per slot, each the sum over its paths,
and the tree has the first `nodes` of their tokens. So texts of different lengths compete, and slots
need not hold the token of one position. Trained by the CTC loss of the target's answers
(`mmspec.training.ctc_drafter.CTC`). Exact, with any head. Reconstructed: prefix beam search, where
the paper collapses Medusa's candidates; sizes; the shared output head; coupled noise for sampling.
"""

from mmspec.drafters.neural.ctc_tree import CTC_HEAD, CollapsedTree, ctc_tree
from mmspec.drafters.neural.multi_token import SEES
from mmspec.recipe import Recipe
from mmspec.training.ctc_drafter import CTC
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=ctc_tree,
    execution=CollapsedTree(),
    verifier=Coupled(),
    optimisation="CTC loss of the target's answers",
    sees=SEES,
    draft_model=(CTC_HEAD,),
    training=CTC,
    options={"nodes": 32, "beam": 16, "width": 8},
    paper="Wen et al. 2024",
    reconstructed="prefix beam search; sizes; the output head; coupled sampling",
)
