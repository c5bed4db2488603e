"""A scripted expert for the table: move on an arc, descend, turn, open, close."""

from __future__ import annotations

import math

import numpy as np

from mmspec.modalities.vla.worlds.arm import BASE, LIMITS, LOWEST, polar, tilt

NEAR = 0.12  # metres from the object, within which the gripper opens

_SWING, _REACH = 0.045, 0.016  # maximum of a step: rad of the base joint, metres of the reach
_CLOSES = (0.035, 0.06, 0.3, 0.2)  # metres aside and above the table, rad of yaw and of tilt


def yaw_at(x: float, y: float) -> float:
    """Yaw (rad) for grasping an object: perpendicular to the line from the base to it."""
    return polar(x, y)[1]


def pose_errors(pose: np.ndarray, goal: tuple[float, float]) -> tuple[float, float, float, float]:
    """Errors of a pose (7,): horizontal and vertical in metres, yaw and tilt in rad."""
    x, y, z, roll, pitch, yaw = (float(value) for value in pose[:6])
    wanted = tilt(x, y, z)
    aside = math.hypot(goal[0] - x, goal[1] - y)
    tilted = math.hypot(wanted[0] - roll, wanted[1] - pitch)
    return aside, z, abs(yaw_at(*goal) - yaw), tilted


def table_expert(pose: np.ndarray, goal: tuple[float, float]) -> np.ndarray:
    """The action (7,) float32 that moves a pose (7,) towards grasping the object at `goal`."""
    x, y, z, roll, pitch, yaw, aperture = (float(value) for value in pose)
    aside = math.hypot(goal[0] - x, goal[1] - y)
    here, there = polar(x, y), polar(*goal)
    reach = here[0] + _limit(there[0] - here[0], 0.35, _REACH)
    bearing = here[1] + _limit(there[1] - here[1], 0.35, _SWING)
    dx = BASE[0] + reach * math.sin(bearing) - x
    dy = BASE[1] + reach * math.cos(bearing) - y
    hover = min(0.18, LOWEST + 0.7 * max(0.0, aside - 0.03))
    dz = _limit(hover - z, 0.5, float(LIMITS[2]))
    wanted = tilt(x + dx, y + dy, z + dz)
    droll = _limit(wanted[0] - roll, 0.7, float(LIMITS[3]))
    dpitch = _limit(wanted[1] - pitch, 0.7, float(LIMITS[4]))
    dyaw = _limit(yaw_at(*goal) - yaw, 0.35, float(LIMITS[5]))
    errors = zip(pose_errors(pose, goal), _CLOSES, strict=True)
    is_there = all(error < tolerance for error, tolerance in errors)
    is_open = aside < NEAR and (not is_there or aperture < 0.3)
    return np.array([dx, dy, dz, droll, dpitch, dyaw, float(is_open)], np.float32)


def _limit(error: float, share: float, maximum: float) -> float:
    """A share of an error, clipped to a maximum."""
    return max(-maximum, min(maximum, share * error))
