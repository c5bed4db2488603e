"""Speculative sampling of deep frames: codes are verified one by one, across frames.

Leviathan et al. 2023, applied to frames: those of a backbone and a depth decoder (CSM) are a flat
sequence of codes, whose distributions two passes give. Exact: the distribution is the target's,
with other samples than plain decoding. Also exact for delay patterns, where `frame-joint` accepts
more.
"""

from dataclasses import replace

from mmspec.recipes.frame_coupled import RECIPE as COUPLED
from mmspec.verifiers.depth_frames import DepthFrames

RECIPE = replace(COUPLED, verifier=DepthFrames(), paper="Leviathan et al. 2023")
