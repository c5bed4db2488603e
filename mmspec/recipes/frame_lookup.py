"""Frame lookup: propose again what followed an earlier frame like the last one.

Prompt lookup (Saxena 2023) over frames of several codebooks. Exact, and needs no draft model;
useful where sound is constant or repeats.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.frame_lookup import frame_lookup
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled_frames import CoupledFrames

RECIPE = Recipe(
    architecture=frame_lookup,
    execution=Chain(Fixed(4)),
    verifier=CoupledFrames(),
    paper="Saxena 2023",
    reconstructed="the carry-over to frames of several codebooks",
    decodes="frames",
)
