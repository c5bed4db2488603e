"""LayerSkip: the first layers of the target draft, through its own head.

Elhoushi et al. 2024, "LayerSkip: enabling early exit inference and self-speculative decoding" (8 of
32 layers, 6 tokens). It is meant for targets trained with early exits. Exact. Reconstructed:
verification here reads the draft through all layers, where the paper reuses the early states.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.shared import early_exit, with_own_layers
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.coupled import Coupled

RECIPE = with_own_layers(
    early_exit,
    Chain(Fixed(6)),
    Coupled(),
    optimisation="the target is trained with early exits",
    options={"depth": None},
    paper="Elhoushi et al. 2024",
    reconstructed="early layers are computed again in verification",
)
