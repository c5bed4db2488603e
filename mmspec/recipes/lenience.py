"""Lenience: speculative sampling that tolerates an error of the drafter by a factor.

Leviathan et al. 2023, appendix; CS-Drafting (Chen et al. 2023). Accept with min(1, p / (ell q)).
Lossy: the distribution m of a token obeys m <= p / ell; ell = 1 is speculative sampling, exact.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.recursive import Recursive

RECIPE = with_draft_model(
    execution=Chain(Fixed(5)),
    verifier=Recursive(Lenience(ell=0.8)),
    paper="Leviathan et al. 2023; Chen et al. 2023",
)
