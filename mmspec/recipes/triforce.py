"""TriForce: the target on a part of its cache drafts, and a small model drafts for that.

Sun et al. 2024 ("TriForce: lossless acceleration of long sequence generation with hierarchical
speculative decoding"). The small model drafts `inner` tokens, the target verifies them on the part
of its cache that `kv` selects, and the whole cache verifies the result. Exact: the last step uses
the distributions on the part of the cache. Reconstructed: `kv` selects visual tokens by the
question's attention, where the paper retrieves chunks of text; the small model keeps its whole
cache.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.cascades import cascade_in_cache
from mmspec.drafters.neural.small_model import SMALL_MODEL
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=cascade_in_cache,
    execution=Chain(Fixed(6)),
    verifier=Coupled(),
    sees="auto",
    kv="sparse:tokens=512,share=0.25",
    draft_model=(SMALL_MODEL,),
    options={"inner": 2},
    paper="Sun et al. 2024",
    reconstructed="visual tokens selected by attention; the small model keeps its cache",
)
