"""Speculative sampling of deep frames: codes are walked one by one, through frames.

Leviathan et al. 2023, carried over: frames of a backbone and a depth decoder (CSM) are a flat
sequence of codes, whose laws two passes give. Exact: the law is the target's, its draws are others
than plain decoding's. Right for delay patterns, too, where `frame-joint` accepts more.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.length import Fixed
from mmspec.drafters.neural.frame_model import FRAME_MODEL, frame_model
from mmspec.recipe import Recipe
from mmspec.verifiers.depth_frames import DepthFrames

RECIPE = Recipe(
    architecture=frame_model,
    execution=Chain(Fixed(3)),
    verifier=DepthFrames(),
    sees="prompt",
    draft_model=(FRAME_MODEL,),
    paper="Leviathan et al. 2023",
    reconstructed="the carry-over to frames of several codebooks",
    decodes="frames",
)
