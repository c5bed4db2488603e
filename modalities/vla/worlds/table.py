"""Reach for the named thing: an arm over a table with things of the Scene world.

world = TableReach(split="held-out")
observation, info = world.reset(seed=0)       # info["instruction"]: "reach the large red circle"
observation, reward, terminated, truncated, info = world.step(world.expert())
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mmspec.errors import check_number, is_whole
from mmspec.modalities.vla.worlds.arm import LIMITS, SIDE, draw_arm, moved, tilt
from mmspec.modalities.vla.worlds.expert import misses, table_expert
from mmspec.modalities.vla.worlds.extra import needed
from mmspec.zoo.language import scenes
from mmspec.zoo.scene import BOARD, Scene, Split, Style, Thing, textured

if TYPE_CHECKING:
    import gymnasium
    from gymnasium import spaces
else:
    gymnasium, spaces = needed("gymnasium"), needed("gymnasium.spaces")

Observation = dict[str, np.ndarray]
SUCCESS = (0.04, 0.065, 0.35, 0.25)  # metres aside and above the table, rad of yaw and of tilt
SHUT = 0.25  # aperture of a gripper that has closed
MOST_STEPS = 80
_SEEDS = 1 << 16  # of the Scene world
_STARTS = np.array([[-0.26, 0.26], [-0.26, 0.26], [0.1, 0.22]])  # metres


class TableReach(gymnasium.Env[Observation, np.ndarray]):
    """A Gymnasium environment without physics: the hand goes where it is told, within limits.

    An action is (dx, dy, dz) in metres, (droll, dpitch, dyaw) in radians, and the aperture that the
    gripper is to have (0 closed, 1 open). More than the arm can do in a step is done as far as it
    can. The state is the pose: x, y, z, roll, pitch, yaw, aperture. An episode is a success when
    the gripper closes on the named thing: near it, low, turned along the line from the arm's base,
    and leaning as the arm's reach demands; it is cut off after 80 steps. The same seed gives the
    same episode. `split`: the side of the Scene world's division that scenes are taken from;
    `style`: "plain" paper, or "textured" grounds with things lying free, as a camera takes them;
    `size`: side of the picture in pixels.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as declared there

    def __init__(
        self,
        split: Split = "train",
        style: Style = "plain",
        size: int = 72,
        render_mode: str | None = None,
    ) -> None:
        """Raises ValueError for a split, style, size or render mode that there is not."""
        for name, value, known in (
            ("split", split, ("train", "held-out")),
            ("style", style, ("plain", "textured")),
            ("render_mode", render_mode, (None, "rgb_array")),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is not known; choose one of {known}")
        check_number("size", size, 16, 1024, whole=True, example=72)
        self.split: Split = split
        self.style: Style = style
        self.size = size
        self.render_mode = render_mode
        least, most = (np.array(one, np.float32) for one in ([*-LIMITS, 0.0], [*LIMITS, 1.0]))
        self.action_space = spaces.Box(least, most)
        bound = np.full(7, 2.0, np.float32)
        shown = spaces.Box(0, 255, (size, size, 3), np.uint8)
        observed: Any = spaces.Dict({"image": shown, "state": spaces.Box(-bound, bound)})
        self.observation_space = observed
        self._scene: Scene | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new scene, hand and goal. `options={"thing": i}` names the i-th thing of the scene."""
        options = options or {}
        if set(options) - {"thing"}:
            raise ValueError(f"options {sorted(options)} are not known; give {{'thing': number}}")
        super().reset(seed=seed)
        generator = self.np_random
        ((self._scene, _),) = scenes(1, self.split, int(generator.integers(_SEEDS)))
        if self.style == "textured":
            self._scene = textured(self._scene, generator)
        self._table = replace(self._scene, camera=None).render(self.size)
        self._pose = start_pose(generator)
        self._steps, self._is_done = 0, False
        chosen = int(generator.integers(len(self._scene.things)))
        self.aim(options.get("thing", chosen))
        return self._observe(), self._info(False)

    def aim(self, thing: int) -> str:
        """Ask for the i-th thing of the scene from now on, and return the new instruction.

        Raises ValueError before the first reset and for a thing that there is not.
        """
        scene = self.scene
        if not is_whole(thing) or not 0 <= thing < len(scene.things):
            raise ValueError(f"thing={thing!r}; the scene has things 0 to {len(scene.things) - 1}")
        self._goal = int(thing)
        return instruction(scene.things[self._goal])

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move the arm. Raises ValueError for an action of another shape, or that is not finite."""
        given, goal = np.asarray(action, np.float64), self.goal
        if self._is_done:
            raise ValueError("the episode is over; call reset() before the next step")
        if given.shape != (7,) or not np.isfinite(given).all():
            raise ValueError(f"action is {action!r}; it must be (7,) finite numbers")
        before = self._pose
        self._pose = moved(before, given, self.np_random)
        self._steps += 1
        closes = before[6] > SHUT >= self._pose[6]
        off = misses(self._pose, goal)
        is_success = bool(closes and all(a < most for a, most in zip(off, SUCCESS, strict=True)))
        truncated = not is_success and self._steps >= MOST_STEPS
        self._is_done = is_success or truncated
        return self._observe(), float(is_success), is_success, truncated, self._info(is_success)

    @property
    def scene(self) -> Scene:
        """What lies on the table. Raises ValueError before the first reset."""
        if self._scene is None:
            raise ValueError("the world has not begun; call reset() first")
        return self._scene

    @property
    def goal(self) -> tuple[float, float]:
        """Where the named thing lies: (x, y) in metres. Raises ValueError like `scene`."""
        return place(self.scene.things[self._goal])

    def expert(self) -> np.ndarray:
        """What the scripted expert does now: an action (7,) float32."""
        goal = self.goal
        return table_expert(self._pose, goal)

    def render(self) -> np.ndarray:  # -> (H, W, 3) uint8
        """The picture as the policy sees it."""
        return self._observe()["image"]

    def _observe(self) -> Observation:
        scene = self.scene
        image = picture(self._table, self._pose)
        if scene.camera is not None:
            image = replace(scene.camera, seed=scene.camera.seed + self._steps).take(image)
        return {"image": np.array(image), "state": self._pose.astype(np.float32)}

    def _info(self, is_success: bool) -> dict[str, Any]:
        asked = instruction(self.scene.things[self._goal])
        return {"instruction": asked, "is_success": is_success}


def instruction(thing: Thing) -> str:
    """What is asked of the policy."""
    return f"reach the {thing.size} {thing.colour} {thing.name}"


def place(thing: Thing) -> tuple[float, float]:
    """Where a thing lies on the table: (x, y) in metres."""
    across, down = thing.column + 0.5 + thing.shift[0], thing.row + 0.5 + thing.shift[1]
    return (across / BOARD - 0.5) * SIDE, (0.5 - down / BOARD) * SIDE


def start_pose(generator: np.random.Generator) -> np.ndarray:  # -> (7,)
    """Some pose above the table: gripper closed, wrist about as it should lean, any yaw."""
    x, y, z = (float(value) for value in generator.uniform(*_STARTS.T))
    roll, pitch = np.array(tilt(x, y, z)) + generator.normal(0, 0.005, 2)
    return np.array([x, y, z, roll, pitch, generator.uniform(-1.2, 1.2), 0.0])


def picture(table: Image.Image, pose: np.ndarray) -> Image.Image:
    """The arm in a pose (7,) over a picture of the table."""
    shown = table.copy()
    arm = draw_arm(pose, table.width)
    shown.paste(arm, mask=arm.getchannel("A"))
    return shown
