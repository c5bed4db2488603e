"""SpecVLM (video): a smaller model of the family drafts a tree from a tenth of the visual tokens.

Ji et al. 2025, "SpecVLM: enhancing speculative decoding of video LLMs via verifier-guided token
pruning". Tokens are selected by the target's prefill: the fewest that hold 40 % of the question's
attention, and an even sample of the rest. The drafter reads its own features of those tokens at
their original positions, where the release renumbers them. For images and clips. Exact; verified
with coupled noise, on the released tree of 25 nodes. Tokens are selected once, as in the release.
Drafters without image input draft without it.
"""

from mmspec.compressors.top_p_uniform import TopPUniform
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.drafters.shapes import StaticTree
from mmspec.recipe import Recipe
from mmspec.recipes.eagle import TREE
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=small_model,
    execution=StaticTree(TREE),
    verifier=Coupled(),
    optimisation="a tenth of the visual tokens, by the target's attention and evenly",
    compressor=TopPUniform(keep=0.1, mass=0.4),
    sees="auto",
    draft_model=(SMALL_MODEL,),
    paper="Ji et al. 2025",
)
