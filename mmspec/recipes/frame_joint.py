"""Speculative sampling of delayed frames: one ratio tests all codes of a frame together.

Leviathan et al. 2023, carried over: a frame of a delay pattern (MusicGen, Copet et al. 2023) is one
draw from a product of distributions. Exact: the distribution is the target's, its draws are others
than plain decoding's.
"""

from dataclasses import replace

from mmspec.recipes.frame_depth import RECIPE as DEPTH
from mmspec.verifiers.joint_frames import JointFrames

RECIPE = replace(DEPTH, verifier=JointFrames())
