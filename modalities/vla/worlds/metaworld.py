"""Tasks of Meta-World (Yu et al. 2019; v3), simulated by MuJoCo with contacts.

Rendering needs OpenGL: on a machine without display set MUJOCO_GL=egl before MuJoCo is imported.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from mmspec.errors import check_number
from mmspec.modalities.vla.worlds import import_extra

if TYPE_CHECKING:
    import gymnasium
    from gymnasium import spaces
else:
    gymnasium, spaces = import_extra("gymnasium"), import_extra("gymnasium.spaces")

STEP = 0.01  # maximum commanded motion of the hand per step and axis, in metres
_LIMIT = 500  # steps after which Meta-World itself ends an episode
_CAMERA = "corner2"
_SEEDS = 1 << 31


class MetaWorldTask(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """One task as a Gymnasium environment, with image and state observations.

    An action is (4,): dx, dy, dz in metres, and the gripper (0 closed, 1 open); dx, dy, dz are
    clipped to `STEP`. The state is (4,): x, y, z of the hand in metres, and the opening of its
    fingers, 0 to 1. The episode ends on success, or after `steps` steps; the seed places hand,
    objects and goal. `task`: a name of Meta-World, such as "reach-v3"; `size`: side of the image in
    pixels.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012 - as declared there

    def __init__(
        self,
        task: str = "reach-v3",
        size: int = 96,
        steps: int = 150,
        render_mode: str | None = None,
    ) -> None:
        """Raises ValueError for unknown tasks and render modes, and for bad sizes and steps."""
        tasks = import_extra("metaworld.env_dict").ALL_V3_ENVIRONMENTS
        if task not in tasks:
            raise ValueError(
                f"task={task!r} is not of Meta-World; choose one of {', '.join(tasks)}"
            )
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode={render_mode!r} is not known; give None or 'rgb_array'")
        check_number("size", size, 16, 1024, whole=True, example=96)
        check_number("steps", steps, 1, _LIMIT - 1, whole=True, example=150)
        self.render_mode, self.size, self.steps = render_mode, size, steps
        self.instruction = task.removesuffix("-v3").replace("-", " ")
        self._world = _make_task(tasks[task], size)
        self._expert = import_extra("metaworld.policies").ENV_POLICY_MAP[task]()
        high = np.array([STEP, STEP, STEP, 1.0], np.float32)
        self.action_space = spaces.Box(np.array([-STEP, -STEP, -STEP, 0.0], np.float32), high)
        image = spaces.Box(0, 255, (size, size, 3), np.uint8)
        reach = np.full(4, 2.0, np.float32)
        space: Any = spaces.Dict({"image": image, "state": spaces.Box(-reach, reach)})
        self.observation_space = space
        self._full: np.ndarray | None = None  # Meta-World's own observation

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """A new placement of hand, objects and goal. Raises ValueError for options."""
        if options:
            raise ValueError(f"options {sorted(options)} are not known; give none")
        super().reset(seed=seed)
        self._world.seed(int(self.np_random.integers(_SEEDS)))
        self._full, _ = self._world.reset()
        self._done, self._is_over = 0, False
        return self._observe(), self._info(False)

    def step(
        self, action: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Move the arm. Raises ValueError for an action of another shape, or that is not finite."""
        given = np.asarray(action, np.float64)
        self._last_observation()
        if self._is_over:
            raise ValueError("the episode is over; call reset() before the next step")
        if given.shape != (4,) or not np.isfinite(given).all():
            raise ValueError(f"action is {action!r}; it must be (4,) finite numbers")
        effort = np.append(given[:3] / STEP, 1 - 2 * given[3])  # closing is positive there
        self._full, reward, _, _, info = self._world.step(np.clip(effort, -1, 1).astype(np.float32))
        self._done += 1
        is_success = bool(info["success"])
        truncated = not is_success and self._done >= self.steps
        self._is_over = is_success or truncated
        return self._observe(), float(reward), is_success, truncated, self._info(is_success)

    def expert(self) -> np.ndarray:
        """The action (4,) float32 of Meta-World's scripted policy."""
        full = self._last_observation()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # its actions exceed the limits
            effort = np.clip(self._expert.get_action(full), -1, 1)
        return np.append(effort[:3] * STEP, (1 - effort[3]) / 2).astype(np.float32)

    def render(self) -> np.ndarray:  # -> (H, W, 3) uint8
        """The camera image of the observation."""
        return self._observe()["image"]

    def close(self) -> None:
        """Free the simulator and its renderer."""
        self._world.close()

    def _observe(self) -> dict[str, np.ndarray]:
        state = self._last_observation()[:4].astype(np.float32)
        picture = np.asarray(self._world.render(), np.uint8)
        return {"image": np.ascontiguousarray(picture[::-1]), "state": state}  # upside down

    def _last_observation(self) -> np.ndarray:
        if self._full is None:
            raise ValueError("the environment has no episode; call reset() first")
        return self._full

    def _info(self, is_success: bool) -> dict[str, Any]:
        return {"instruction": self.instruction, "is_success": is_success}


def _make_task(task: Any, size: int) -> Any:
    """Create a task of Meta-World with seeded placements and a visible goal."""
    world = task(render_mode="rgb_array", camera_name=_CAMERA, width=size, height=size)
    world._partially_observable = False
    vars(world).pop("sawyer_observation_space", None)  # made while the goal was hidden
    world._freeze_rand_vec = False  # as its own classes with a visible goal do
    world._set_task_called = True
    world.seeded_rand_vec = True
    return world
