"""Plain decoding of frames: no drafter, one frame per forward, with the noise of coupled recipes.

Exact. The baseline that every exact coupled recipe of frames reproduces code for code.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.plain import no_drafter
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled_frames import CoupledFrames

RECIPE = Recipe(
    architecture=no_drafter,
    execution=Chain(Fixed(1)),
    verifier=CoupledFrames(),
    decodes="frames",
)
