"""Speculative sampling of deep frames: codes are walked one by one, through frames.

Leviathan et al. 2023, carried over: frames of a backbone and a depth decoder (CSM) are a flat
sequence of codes, whose distributions two passes give. Exact: the distribution is the target's, its
draws are others than plain decoding's. Right for delay patterns, too, where `frame-joint` accepts
more.
"""

from dataclasses import replace

from mmspec.recipes.frame_coupled import RECIPE as COUPLED
from mmspec.verifiers.depth_frames import DepthFrames

RECIPE = replace(COUPLED, verifier=DepthFrames(), paper="Leviathan et al. 2023")
