"""Coupled speculation of frames: a smaller model of the same codebooks draws with the same noise.

Daliri et al. 2025, code by code: noise is keyed by place and codebook, so whole frames of a delay
pattern or of a depth decoder come out as in plain decoding with the same seed. Exact. That codes of
one frame share a decision is our reading; the papers speak of single tokens.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.frame_model import FRAME_MODEL, frame_model
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled_frames import CoupledFrames

RECIPE = Recipe(
    architecture=frame_model,
    execution=Chain(Fixed(3)),
    verifier=CoupledFrames(),
    sees="prompt",
    draft_model=(FRAME_MODEL,),
    paper="Daliri et al. 2025",
    reconstructed="the carry-over to frames of several codebooks",
    decodes="frames",
)
