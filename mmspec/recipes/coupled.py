"""Coupled speculation: a small model and the target sample with the same Gumbel noise.

Daliri et al. 2025 ("Coupling without communication"); Kobus and Gunduz 2025 (Gumbel races). The
default. Exact, and reproducible: the output is a function of the target and the seed alone,
whatever the drafter, draft length, tree or batch. Acceptance lies between (1 - TV) / (1 + TV) and 1
- TV.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.coupled import Coupled

RECIPE = with_draft_model(
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    paper="Daliri et al. 2025; Kobus and Gunduz 2025",
)
