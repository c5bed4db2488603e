"""Reach for the named object: an arm over a table with objects of the Scene world.

world = TableReach(split="held-out")
observation, info = world.reset(seed=0)       # info["instruction"]: "reach the large red circle"
observation, reward, terminated, truncated, info = world.step(world.expert())
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mmspec.errors import check_number, is_integer
from mmspec.modalities.vla.worlds import import_extra
from mmspec.modalities.vla.worlds.arm import LIMITS, SIDE, apply_action, draw_arm, tilt
from mmspec.modalities.vla.worlds.expert import pose_errors, table_expert
from mmspec.zoo.language import scenes
from mmspec.zoo.scene import BOARD, Scene, Split, Style, Thing, add_texture

if TYPE_CHECKING:
    import gymnasium
    from gymnasium import spaces
else:
    gymnasium, spaces = import_extra("gymnasium"), import_extra("gymnasium.spaces")

Observation = dict[str, np.ndarray]
SUCCESS = (0.04, 0.065, 0.35, 0.25)  # metres aside and above the table, rad of yaw and of tilt
SHUT = 0.25  # aperture of a gripper that has closed
MAX_STEPS = 80
SPLITS, RENDER_MODES = ("train", "held-out"), (None, "rgb_array")
_SEEDS = 1 << 16  # of the Scene world
_STARTS = np.array([[-0.26, 0.26], [-0.26, 0.26], [0.1, 0.22]])  # metres


class TableReach(gymnasium.Env[Observation, np.ndarray]):
    """A kinematic Gymnasium environment without physics.

    An action is (dx, dy, dz) in metres, (droll, dpitch, dyaw) in radians, and the target aperture
    of the gripper (0 closed, 1 open), clipped to the limits of a step. The state is the pose: x, y,
    z, roll, pitch, yaw, aperture. An episode succeeds when the gripper closes on the named object:
    close to it, low, with the required yaw and tilt; it is truncated after 80 steps. The same seed
    gives the same episode. `split`: the split of Scene world scenes; `style`: "plain" paper, or
    "textured" backgrounds with free placement and camera noise; `size`: side of the image in
    pixels.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as declared there

    def __init__(
        self,
        split: Split = "train",
        style: Style = "plain",
        size: int = 72,
        render_mode: str | None = None,
    ) -> None:
        """Raises ValueError for an unknown split, style or render mode, and for a bad size."""
        check_choices(split=(split, SPLITS), style=(style, ("plain", "textured")))
        check_choices(render_mode=(render_mode, RENDER_MODES))
        check_number("size", size, 16, 1024, whole=True, example=72)
        self.split: Split = split
        self.style: Style = style
        self.size = size
        self.render_mode = render_mode
        self.action_space, self.observation_space = make_spaces(size)
        self._scene: Scene | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new scene, pose and goal. `options={"thing": i}` selects the i-th object."""
        options = options or {}
        if set(options) - {"thing"}:
            raise ValueError(f"options {sorted(options)} are not known; give {{'thing': number}}")
        super().reset(seed=seed)
        generator = self.np_random
        ((self._scene, _),) = scenes(1, self.split, int(generator.integers(_SEEDS)))
        if self.style == "textured":
            self._scene = add_texture(self._scene, generator)
        self._table = replace(self._scene, camera=None).render(self.size)
        self._pose = start_pose(generator)
        self._steps, self._is_done = 0, False
        chosen = int(generator.integers(len(self._scene.things)))
        self.aim(options.get("thing", chosen))
        return self._observe(), self._info(False)

    def aim(self, thing: int) -> str:
        """Set the goal to the i-th object of the scene, and return the new instruction.

        Raises ValueError before the first reset and for an unknown object.
        """
        scene = self.scene
        if not is_integer(thing) or not 0 <= thing < len(scene.things):
            raise ValueError(f"thing={thing!r}; the scene has things 0 to {len(scene.things) - 1}")
        self._goal = int(thing)
        return format_instruction(scene.things[self._goal])

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move the arm. Raises ValueError for an action of another shape, or that is not finite."""
        goal = self.goal
        given, before = check_action(action, self._is_done), self._pose
        self._pose = apply_action(before, given, self.np_random)
        self._steps += 1
        is_success = is_grasp(before, self._pose, goal)
        truncated = not is_success and self._steps >= MAX_STEPS
        self._is_done = is_success or truncated
        return self._observe(), float(is_success), is_success, truncated, self._info(is_success)

    @property
    def scene(self) -> Scene:
        """The scene on the table. Raises ValueError before the first reset."""
        if self._scene is None:
            raise ValueError("the environment has no episode; call reset() first")
        return self._scene

    @property
    def goal(self) -> tuple[float, float]:
        """The position (x, y) of the goal in metres. Raises ValueError like `scene`."""
        return position(self.scene.things[self._goal])

    def expert(self) -> np.ndarray:
        """The action (7,) float32 of the scripted expert."""
        goal = self.goal
        return table_expert(self._pose, goal)

    def render(self) -> np.ndarray:  # -> (H, W, 3) uint8
        """The camera image of the observation."""
        return self._observe()["image"]

    def _observe(self) -> Observation:
        scene = self.scene
        image = render_pose(self._table, self._pose)
        if scene.camera is not None:
            image = replace(scene.camera, seed=scene.camera.seed + self._steps).take(image)
        return {"image": np.array(image), "state": self._pose.astype(np.float32)}

    def _info(self, is_success: bool) -> dict[str, Any]:
        instruction = format_instruction(self.scene.things[self._goal])
        return {"instruction": instruction, "is_success": is_success}


def make_spaces(size: int) -> tuple[Any, Any]:
    """Spaces of the actions of the arm, and of images of `size` pixels with the pose."""
    low, high = (np.array(one, np.float32) for one in ([*-LIMITS, 0.0], [*LIMITS, 1.0]))
    bound = np.full(7, 2.0, np.float32)
    image = spaces.Box(0, 255, (size, size, 3), np.uint8)
    seen = spaces.Dict({"image": image, "state": spaces.Box(-bound, bound)})
    return spaces.Box(low, high), seen


def check_choices(**given: tuple[Any, tuple[Any, ...]]) -> None:
    """Raises ValueError for a value that is not one of those known, by name."""
    for name, (value, known) in given.items():
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known; choose one of {known}")


def check_action(action: np.ndarray, is_done: bool) -> np.ndarray:  # (7,) -> (7,) float64
    """Raises ValueError after the end of an episode, and for another shape, NaN or infinity."""
    given = np.asarray(action, np.float64)
    if is_done:
        raise ValueError("the episode is over; call reset() before the next step")
    if given.shape != (7,) or not np.isfinite(given).all():
        raise ValueError(f"action is {action!r}; it must be (7,) finite numbers")
    return given


def is_grasp(before: np.ndarray, after: np.ndarray, goal: tuple[float, float]) -> bool:
    """Whether the gripper closed on the object at `goal` between two poses (7,)."""
    closes = before[6] > SHUT >= after[6]
    errors = pose_errors(after, goal)
    return bool(closes and all(a < b for a, b in zip(errors, SUCCESS, strict=True)))


def format_instruction(thing: Thing) -> str:
    """The instruction for an object."""
    return f"reach the {thing.size} {thing.colour} {thing.name}"


def position(thing: Thing) -> tuple[float, float]:
    """The position of an object on the table: (x, y) in metres."""
    across, down = thing.column + 0.5 + thing.shift[0], thing.row + 0.5 + thing.shift[1]
    return (across / BOARD - 0.5) * SIDE, (0.5 - down / BOARD) * SIDE


def start_pose(generator: np.random.Generator) -> np.ndarray:  # -> (7,)
    """A random pose above the table: gripper closed, about the required tilt, any yaw."""
    x, y, z = (float(value) for value in generator.uniform(*_STARTS.T))
    roll, pitch = np.array(tilt(x, y, z)) + generator.normal(0, 0.005, 2)
    return np.array([x, y, z, roll, pitch, generator.uniform(-1.2, 1.2), 0.0])


def render_pose(table: Image.Image, pose: np.ndarray) -> Image.Image:
    """Render the arm in a pose (7,) over an image of the table."""
    image = table.copy()
    arm = draw_arm(pose, table.width)
    image.paste(arm, mask=arm.getchannel("A"))
    return image
