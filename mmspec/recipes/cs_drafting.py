"""CS-Drafting: a small model drafts with the help of a search, which drafts the last tokens alone.

Chen et al. 2023 ("Cascade speculative drafting"). Vertical cascade: the small model verifies
`inner` tokens that were copied after an n-gram of the text, so that it runs once for several.
Horizontal cascade: `tail` further tokens are copied, because late tokens are accepted less often.
Exact: the target verifies with the small model's own distributions. Reconstructed: lenience between
drafters is left out, and the search is prompt lookup without a bigram table.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.cascades import cascade_with_search
from mmspec.drafters.neural.small_model import SMALL_MODEL
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=cascade_with_search,
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    sees="auto",
    draft_model=(SMALL_MODEL,),
    options={"inner": 10, "tail": 10, "longest": 3},
    paper="Chen et al. 2023",
    reconstructed="no lenience between drafters; prompt lookup in place of Max-Gram",
)
