"""SpecVLM (video): a smaller model of the family drafts a tree from a tenth of the visual tokens.

Ji et al. 2025, "SpecVLM: enhancing speculative decoding of video LLMs via verifier-guided token
pruning". The target's own prefill says which tokens matter: the fewest that hold 40 % of the
question's attention, and an even sample of the rest. The drafter's own features of those tokens are
all it gets; they keep their positions, where the release counts anew and leaves multimodal ones
out. For pictures as for clips. Exact; verified with coupled noise, on the released tree of 25
nodes. Tokens are chosen once, as in the release. Drafters that see no picture draft without it.
"""

from mmspec.compressors.top_p_uniform import TopPUniform
from mmspec.drafters.growth import StaticTree
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
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
