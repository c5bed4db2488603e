"""A scripted expert for the table: swing over on an arc, descend, turn, open, close."""

from __future__ import annotations

import math

import numpy as np

from mmspec.modalities.vla.worlds.arm import BASE, LIMITS, LOWEST, polar, tilt

NEAR = 0.12  # metres from the thing, within which the gripper opens

_SWING, _REACH = 0.045, 0.016  # of a step at most: rad of the base joint, metres of the reach
_CLOSES = (0.035, 0.06, 0.3, 0.2)  # metres aside and above the table, rad of yaw and of tilt


def yaw_at(x: float, y: float) -> float:
    """Yaw (rad) with which a thing there is grasped: across the line from the base to it."""
    return polar(x, y)[1]


def misses(pose: np.ndarray, goal: tuple[float, float]) -> tuple[float, float, float, float]:
    """How far a pose (7,) is off: metres aside, metres up, rad of yaw, rad of tilt."""
    x, y, z, roll, pitch, yaw = (float(value) for value in pose[:6])
    wanted = tilt(x, y, z)
    aside = math.hypot(goal[0] - x, goal[1] - y)
    tilted = math.hypot(wanted[0] - roll, wanted[1] - pitch)
    return aside, z, abs(yaw_at(*goal) - yaw), tilted


def table_expert(pose: np.ndarray, goal: tuple[float, float]) -> np.ndarray:
    """The action (7,) float32 that brings a pose (7,) nearer to grasping the thing at `goal`."""
    x, y, z, roll, pitch, yaw, aperture = (float(value) for value in pose)
    aside = math.hypot(goal[0] - x, goal[1] - y)
    here, there = polar(x, y), polar(*goal)
    reach = here[0] + _eased(there[0] - here[0], 0.35, _REACH)
    bearing = here[1] + _eased(there[1] - here[1], 0.35, _SWING)
    dx = BASE[0] + reach * math.sin(bearing) - x
    dy = BASE[1] + reach * math.cos(bearing) - y
    hover = min(0.18, LOWEST + 0.7 * max(0.0, aside - 0.03))
    dz = _eased(hover - z, 0.5, float(LIMITS[2]))
    wanted = tilt(x + dx, y + dy, z + dz)
    droll = _eased(wanted[0] - roll, 0.7, float(LIMITS[3]))
    dpitch = _eased(wanted[1] - pitch, 0.7, float(LIMITS[4]))
    dyaw = _eased(yaw_at(*goal) - yaw, 0.35, float(LIMITS[5]))
    is_there = all(off < most for off, most in zip(misses(pose, goal), _CLOSES, strict=True))
    opens = aside < NEAR and (not is_there or aperture < 0.3)
    return np.array([dx, dy, dz, droll, dpitch, dyaw, float(opens)], np.float32)


def _eased(error: float, share: float, most: float) -> float:
    """A share of what is missing, at most so much."""
    return max(-most, min(most, share * error))
