"""Coupled speculation of frames: a smaller model of the same codebooks samples with the same noise.

Daliri et al. 2025, code by code: noise is keyed by position and codebook, so whole frames of a
delay pattern or of a depth decoder come out as in plain decoding with the same seed. Exact.
Reconstructed: codes of one frame share a decision; the papers treat single tokens.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.frame_model import FRAME_MODEL, frame_model
from mmspec.drafters.shapes import Chain
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
