"""Speculative sampling of delayed frames: one ratio tests all codes of a frame together.

Leviathan et al. 2023, applied to frames: one of a delay pattern (MusicGen, Copet et al. 2023) is
one draw from a product of distributions. Exact: the distribution is the target's, with other
samples than plain decoding.
"""

from dataclasses import replace

from mmspec.recipes.frame_depth import RECIPE as DEPTH
from mmspec.verifiers.joint_frames import JointFrames

RECIPE = replace(DEPTH, verifier=JointFrames())
