"""Reach several named objects, one after the other; each moves while it is the goal.

world = MovingGoals(split="held-out")
observation, info = world.reset(seed=0)       # info["instruction"]: "reach the large red circle"
observation, reward, terminated, truncated, info = world.step(world.expert())
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mmspec.errors import check_number
from mmspec.modalities.vla.worlds import import_extra
from mmspec.modalities.vla.worlds.arm import SIDE, apply_action
from mmspec.modalities.vla.worlds.expert import table_expert
from mmspec.modalities.vla.worlds.table import (
    RENDER_MODES,
    SPLITS,
    Observation,
    check_action,
    check_choices,
    format_instruction,
    is_grasp,
    make_spaces,
    position,
    render_pose,
    start_pose,
)
from mmspec.zoo.language import scenes
from mmspec.zoo.scene import BOARD, Scene, Split, Thing, sample_thing

if TYPE_CHECKING:
    import gymnasium
else:
    gymnasium = import_extra("gymnasium")

CELL = SIDE / BOARD  # metres
_SEEDS = 1 << 16  # of the Scene world


class MovingGoals(gymnasium.Env[Observation, np.ndarray]):
    """`TableReach` with more to do: a fuller table, several goals in turn, and goals that move.

    Arm, actions, state and the grasp of a goal are those of `TableReach`. `objects` lie on the
    table; those that the scene does not have are distractors, and share colour or shape with
    another object. `goals` of them are named one after the other: `info["instruction"]` is the
    current step of `info["task"]`, and `info["reached"]` counts the steps that are done. The goal
    moves by `speed` metres a step, and turns back `reach` metres from the middle of its cell. An
    episode succeeds when the last goal is grasped, and is truncated after `steps` steps.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as declared there

    def __init__(
        self,
        split: Split = "train",
        size: int = 72,
        objects: int = 5,
        goals: int = 2,
        speed: float = 0.005,
        reach: float = 0.025,
        steps: int = 80,
        render_mode: str | None = None,
    ) -> None:
        """Raises ValueError for unknown splits and render modes, and numbers out of range."""
        check_choices(split=(split, SPLITS), render_mode=(render_mode, RENDER_MODES))
        check_number("size", size, 16, 1024, whole=True, example=72)
        check_number("objects", objects, 1, BOARD**2, whole=True, example=5)
        check_number("goals", goals, 1, objects, whole=True, example=2)
        check_number("reach", reach, 0, CELL / 2, example=0.025)
        check_number("speed", speed, 0, reach, example=0.005)
        check_number("steps", steps, 1, 100_000, whole=True, example=80)
        self.split: Split = split
        self.size, self.objects, self.goals, self.steps = size, objects, goals, steps
        self.speed, self.reach, self.render_mode = speed, reach, render_mode
        self.action_space, self.observation_space = make_spaces(size)
        self._scene: Scene | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new scene, pose and order of goals. Raises ValueError for options."""
        if options:
            raise ValueError(f"options {sorted(options)} are not known; give none")
        super().reset(seed=seed)
        generator = self.np_random
        self._scene = sample_scene(self.split, self.objects, generator)
        self._table = self._scene.render(self.size)
        order = generator.permutation(self.objects)[: self.goals]
        self._order = tuple(int(one) for one in order)
        self._pose = start_pose(generator)
        self._done, self._reached, self._is_over = 0, 0, False
        self._velocity = self._sample_velocity()
        return self._observe(), self._info()

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move the goal, then the arm. Raises ValueError for an action as `TableReach` does."""
        _ = self.scene  # raises before the first reset
        given, before = check_action(action, self._is_over), self._pose
        self._move_goal()
        self._pose = apply_action(before, given, self.np_random)
        self._done += 1
        grasped = is_grasp(before, self._pose, self.goal)
        self._reached += grasped
        is_success = self._reached == self.goals
        truncated = not is_success and self._done >= self.steps
        self._is_over = is_success or truncated
        if grasped and not is_success:
            self._velocity = self._sample_velocity()
        return self._observe(), float(grasped), is_success, truncated, self._info()

    @property
    def scene(self) -> Scene:
        """The scene on the table now. Raises ValueError before the first reset."""
        if self._scene is None:
            raise ValueError("the environment has no episode; call reset() first")
        return self._scene

    @property
    def goal(self) -> tuple[float, float]:
        """The position (x, y) of the goal in metres. Raises ValueError like `scene`."""
        return position(self.scene.things[self._index])

    def expert(self) -> np.ndarray:
        """The action (7,) float32 of the scripted expert of `TableReach`."""
        goal = self.goal
        return table_expert(self._pose, goal)

    def render(self) -> np.ndarray:  # -> (H, W, 3) uint8
        """The camera image of the observation. Raises ValueError like `scene`."""
        _ = self.scene  # raises before the first reset
        return self._observe()["image"]

    @property
    def _index(self) -> int:
        """Index of the goal; after success, of the last one."""
        return self._order[min(self._reached, self.goals - 1)]

    def _sample_velocity(self) -> np.ndarray:  # (2,) in cells per step
        angle = self.np_random.uniform(0, 2 * math.pi)
        return self.speed / CELL * np.array([math.cos(angle), math.sin(angle)])

    def _move_goal(self) -> None:
        """Move the goal by its velocity, reflected at the ends of its reach, and draw the table."""
        if not self.speed:
            return
        scene, end = self.scene, self.reach / CELL
        thing = scene.things[self._index]
        shift = np.array(thing.shift) + self._velocity
        is_beyond = np.abs(shift) > end
        inwards = -np.copysign(self._velocity, shift)
        self._velocity = np.where(is_beyond, inwards, self._velocity)
        x, y = np.clip(np.where(is_beyond, np.copysign(2 * end, shift) - shift, shift), -end, end)
        moved = replace(thing, shift=(float(x), float(y)))
        things = (moved if one is thing else one for one in scene.things)
        self._scene = replace(scene, things=tuple(things))
        self._table = self._scene.render(self.size)

    def _observe(self) -> Observation:
        image = np.array(render_pose(self._table, self._pose))
        return {"image": image, "state": self._pose.astype(np.float32)}

    def _info(self) -> dict[str, Any]:
        things = self.scene.things
        return {
            "instruction": format_instruction(things[self._index]),
            "task": ", then ".join(format_instruction(things[one]) for one in self._order),
            "reached": self._reached,
            "is_success": self._reached == self.goals,
        }


def sample_scene(split: Split, objects: int, generator: np.random.Generator) -> Scene:
    """A scene of a split with so many objects.

    Objects that a scene of the Scene world lacks are added in empty cells; each has the colour or
    the shape of one that is there. The whole scene is of the split.
    """
    while True:
        ((first, _),) = scenes(1, split, int(generator.integers(_SEEDS)))
        things = list(first.things[:objects])
        taken = {one.row * BOARD + one.column for one in things}
        cells = [at for at in range(BOARD**2) if at not in taken]
        for at in generator.permutation(len(cells))[: objects - len(things)]:
            things.append(_sample_distractor(things, cells[at], generator))
        found = Scene(tuple(sorted(things, key=lambda one: (one.row, one.column))))
        if found.split == split:
            return found


def _sample_distractor(things: list[Thing], cell: int, generator: np.random.Generator) -> Thing:
    while True:
        like = things[generator.integers(len(things))]
        made = sample_thing(generator, cell)
        if generator.random() < 0.5:
            made = replace(made, colour=like.colour)
        else:
            made = replace(made, shape=like.shape, digit=like.digit)
        if all((one.colour, one.name) != (made.colour, made.name) for one in things):
            return made
