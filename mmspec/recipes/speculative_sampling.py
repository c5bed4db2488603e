"""Speculative sampling: accept a small model's draft with min(1, p/q), else correct it.

Leviathan et al. 2023, algorithm 1; Chen et al. 2023. Exact in distribution; accepts more than
coupled speculation, but its samples are not those of plain decoding. Greedy output is the target's
own.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.recursive import Recursive

RECIPE = with_draft_model(
    execution=Chain(Fixed(5)),
    verifier=Recursive(),
    paper="Leviathan et al. 2023; Chen et al. 2023",
)
