"""Speculative sampling of delayed frames: one ratio tests all codes of a frame together.

Leviathan et al. 2023, carried over: a frame of a delay pattern (MusicGen, Copet et al. 2023) is one
draw from a product of laws. Exact: the law is the target's, its draws are others than plain
decoding's.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.length import Fixed
from mmspec.drafters.neural.frame_model import FRAME_MODEL, frame_model
from mmspec.recipe import Recipe
from mmspec.verifiers.joint_frames import JointFrames

RECIPE = Recipe(
    architecture=frame_model,
    execution=Chain(Fixed(3)),
    verifier=JointFrames(),
    sees="prompt",
    draft_model=(FRAME_MODEL,),
    paper="Leviathan et al. 2023",
    reconstructed="the carry-over to frames of several codebooks",
    decodes="frames",
)
