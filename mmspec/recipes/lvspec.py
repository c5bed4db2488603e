"""LVSpec: visually grounded tokens are verified strictly, others up to a shift in position.

Ji et al. 2026 (arXiv 2604.05650), "See the forest for the trees: loosely speculative decoding via
visual-semantic guidance for efficient inference of video LLMs". A drafted token whose state in the
target is as near as `relevance` (mean cosine) to its `nearest` visual tokens must be the target's
own; another may be the target's token up to `shift` positions away. Lossy; `shift=0` or
`relevance=-1` is exact. Drafted by a smaller model that reads a tenth of the visual tokens, as
specvlm-video. Text without an image is verified strictly. Reconstructed, from the abstract and a
digest: whose states are compared, all numbers, how a shift is counted, and the drafter.
"""

from mmspec.compressors.top_p_uniform import TopPUniform
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Recipe
from mmspec.verifiers.visual_relevance import OPTIONS, VisualRelevance, build_visual_relevance

RECIPE = Recipe(
    architecture=small_model,
    execution=Chain(Fixed(5)),
    verifier=Deferred(
        build_visual_relevance, "fillers may have moved a little", kinds=VisualRelevance.kinds
    ),
    optimisation="a tenth of the visual tokens, by the target's attention and evenly",
    compressor=TopPUniform(keep=0.1, mass=0.4),
    options=OPTIONS,
    sees="auto",
    draft_model=(SMALL_MODEL,),
    paper="Ji et al. 2026",
    reconstructed="states, thresholds, shift and drafter",
)
