"""A simulated arm over a table, seen from above: kinematics and rendering.

The table is a square of `SIDE` metres, and fills the image: x points right, y away from the base,
z up. A pose is (7,): x, y, z in metres; roll, pitch, yaw in radians; aperture of the gripper, 0
closed to 1 open. An action is (7,): changes of the pose, and the target aperture.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

SIDE = 0.6
BASE = (0.0, -0.45)  # of the arm
LOWEST, HIGHEST = 0.03, 0.25  # of the hand, in metres above the table
LIMITS = np.array([0.04, 0.04, 0.016, 0.08, 0.08, 0.12])  # of one step, metres and radians
GRIP = 0.5  # maximum change of aperture in one step
_TURNS = np.array([0.6, 0.6, 1.4])  # maximum roll, pitch, yaw
_LINK = 0.42  # length of each of the two links, metres
_SLIP, _SHAKE = 0.06, np.array([1e-3, 1e-3, 1e-3, 2e-3, 2e-3, 8e-3])  # noise of a step
_YIELD = 0.2  # share of the tilt error that the wrist corrects in a step
_OVERSAMPLING = 3
_JAWS = ((0, 205, 220, 255), (235, 0, 235, 255))  # left and right, so that yaw is visible
_RIM, _STEEL = (12, 60, 70, 255), (128, 134, 142, 255)
_SHADOW = (20, 20, 30, 110)


def apply_action(
    pose: np.ndarray, action: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """The pose (7,) after an action (7,): clipped to the limits, with noise.

    The wrist corrects part of its tilt, so that roll and pitch, which are not visible, do not
    drift.
    """
    step = np.clip(action[:6], -LIMITS, LIMITS)
    slip = 1 + _SLIP * generator.standard_normal(6)
    after = pose.astype(np.float64)
    after[:6] += step * slip + _SHAKE * generator.standard_normal(6)
    after[:2] = np.clip(after[:2], -SIDE / 2, SIDE / 2)
    after[2] = np.clip(after[2], LOWEST, HIGHEST)
    after[3:5] += _YIELD * (np.array(tilt(*map(float, after[:3]))) - after[3:5])
    after[3:6] = np.clip(after[3:6], -_TURNS, _TURNS)
    after[6] = np.clip(pose[6] + np.clip(action[6] - pose[6], -GRIP, GRIP), 0.0, 1.0)
    return after


def polar(x: float, y: float) -> tuple[float, float]:
    """Distance (m) and bearing (rad, clockwise from straight ahead) from the base."""
    across, ahead = x - BASE[0], y - BASE[1]
    return math.hypot(across, ahead), math.atan2(across, ahead)


def tilt(x: float, y: float, z: float) -> tuple[float, float]:
    """The required roll and pitch (rad) of the wrist, which depend on the reach of the arm."""
    reach, bearing = polar(x, y)
    return 0.45 * math.sin(bearing), 0.7 * (reach - 0.45) - 0.8 * (z - 0.1)


def draw_arm(pose: np.ndarray, size: int) -> Image.Image:
    """Draw the arm, RGBA of `size` x `size` pixels: links, hand, and the shadow of the hand.

    A higher hand is larger, and farther from its shadow; its jaws show yaw and aperture.
    """
    big = size * _OVERSAMPLING
    picture = Image.new("RGBA", (big, big))
    pen = ImageDraw.Draw(picture)
    x, y, z = (float(value) for value in pose[:3])
    width = round(0.022 * big / SIDE)
    _jaws(pen, big, pose, (x + 0.45 * z, y - 0.3 * z), _SHADOW, 0.0)
    joints = [_pixel(big, *at) for at in (BASE, _elbow(x, y), (x, y))]
    pen.line(joints, fill=_STEEL, width=width, joint="curve")
    _jaws(pen, big, pose, (x, y), _RIM, 0.004)
    _jaws(pen, big, pose, (x, y), None, 0.0)
    return picture.resize((size, size), Image.Resampling.BOX)


def _jaws(
    pen: ImageDraw.ImageDraw,
    big: int,
    pose: np.ndarray,
    at: tuple[float, float],
    colour: tuple[int, int, int, int] | None,
    rim: float,
) -> None:
    """Draw two jaws and the bar between them, `rim` metres larger; `colour` None: their own."""
    scale = 1 + 2.5 * float(pose[2])
    yaw, aperture = float(pose[5]), float(pose[6])
    gap, half, thick = (0.022 + 0.03 * aperture) * scale, 0.045 * scale, 0.012 * scale

    def bar(x0: float, y0: float, x1: float, y1: float, own: tuple[int, int, int, int]) -> None:
        c, s = math.cos(yaw), math.sin(yaw)
        corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
        pen.polygon(
            [_pixel(big, at[0] + c * u + s * v, at[1] - s * u + c * v) for u, v in corners],
            fill=colour or own,
        )

    bar(-gap - rim, -half - rim, gap + rim, -half + 1.6 * thick + rim, _STEEL)
    for side, own in zip((-1, 1), _JAWS, strict=True):
        inner, outer = sorted((side * gap, side * (gap + 2 * thick)))
        bar(inner - rim, -half - rim, outer + rim, half + rim, own)


def _elbow(x: float, y: float) -> tuple[float, float]:
    """Where the two links meet, to the right of the line from base to hand."""
    reach, bearing = polar(x, y)
    bend = math.acos(min(1.0, reach / (2 * _LINK)))
    return BASE[0] + _LINK * math.sin(bearing + bend), BASE[1] + _LINK * math.cos(bearing + bend)


def _pixel(big: int, x: float, y: float) -> tuple[float, float]:
    return (x / SIDE + 0.5) * big, (0.5 - y / SIDE) * big
