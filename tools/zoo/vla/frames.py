"""What the policy learns from: pictures of the arm on its way, and the expert's action for each.

States are those of the expert and of an expert that is pushed about, so that the policy learns to
come back (noise injection, after DART, Laskey et al. 2017). One picture is asked for several goals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmspec.modalities.vla.worlds.arm import HIGHEST, LOWEST, SIDE, moved, tilt
from mmspec.modalities.vla.worlds.expert import table_expert
from mmspec.modalities.vla.worlds.table import instruction, picture, place, start_pose
from mmspec.training.fitting import Course
from mmspec.zoo.language import scenes
from mmspec.zoo.scene import Scene
from tools.zoo.vla.architecture import PIXELS

_LONGEST = 40  # steps of a pushed expert
_PUSHES, _PUSH = 0.12, np.array([0.03, 0.03, 0.02, 0.0, 0.0, 0.2])
_ANYWHERE = 0.15  # share of poses that no expert led to


@dataclass(frozen=True)
class TableFrames:
    """images: (N, P, P, 3) bytes; poses: (N, 7). Per picture what may be asked, the goal first:

    instructions, places (n, 2) in metres, the expert's actions (n, 7).
    """

    images: np.ndarray
    poses: np.ndarray
    scenes: list[Scene]  # of each picture
    asked: list[list[str]]
    goals: list[np.ndarray]
    actions: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.images)


def frames(count: int, each: int, course: Course) -> TableFrames:
    """`each` pictures of every of `count` training scenes."""
    generator = np.random.default_rng((course.seed, 12))
    total = count * each
    images = np.zeros((total, PIXELS, PIXELS, 3), np.uint8)
    poses, shown = np.zeros((total, 7)), []
    asked: list[list[str]] = []
    goals: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    for number, (scene, _) in enumerate(scenes(count, "train", course.seed)):
        table = scene.render(PIXELS)
        for turn in range(each):
            order = [scene.things[i] for i in generator.permutation(len(scene.things))]
            places = np.array([place(thing) for thing in order])
            pose = some_pose(tuple(places[0]), generator)
            at = number * each + turn
            images[at], poses[at] = np.array(picture(table, pose)), pose
            shown.append(scene)
            asked.append([instruction(thing) for thing in order])
            goals.append(places)
            actions.append(np.stack([table_expert(pose, tuple(goal)) for goal in places]))
        course.progress("draw", number + 1, count, float("nan"))
    return TableFrames(images, poses, shown, asked, goals, actions)


def some_pose(goal: tuple[float, float], generator: np.random.Generator) -> np.ndarray:  # -> (7,)
    """A pose on the way of a pushed expert, now and then anywhere.

    The wrist leans as it should there: no picture shows how it leans, and a policy that is taught
    what it cannot see says anything.
    """
    pose = _pushed(goal, generator).copy()
    x, y, z = (float(value) for value in pose[:3])
    pose[3:5] = tilt(x, y, z)
    return pose


def _pushed(goal: tuple[float, float], generator: np.random.Generator) -> np.ndarray:
    pose = start_pose(generator)
    if generator.random() < _ANYWHERE:
        pose[2] = generator.uniform(LOWEST, HIGHEST)
        pose[6] = generator.integers(3) / 2
        return pose
    trail = [pose]
    for _ in range(_LONGEST):
        action = table_expert(pose, goal)
        closes = action[6] == 0 and pose[6] >= 0.5
        pose = moved(pose, action, generator)
        if closes and pose[6] == 0:
            break  # the goal is reached
        if generator.random() < _PUSHES:
            pose[:6] += _PUSH * generator.standard_normal(6)
            pose[:2] = np.clip(pose[:2], -SIDE / 2, SIDE / 2)
            pose[2] = np.clip(pose[2], LOWEST, HIGHEST)
            if generator.random() < 0.5:
                pose[6] = generator.integers(3) / 2
        trail.append(pose)
    return trail[generator.integers(len(trail))]


def statistics(seed: int, count: int = 400) -> dict[str, list[float] | list[bool]]:
    """q01, q99 and mask of the expert's actions over undisturbed episodes."""
    generator = np.random.default_rng((seed, 13))
    found = []
    for scene, _ in scenes(count, "train", seed):
        goal = place(scene.things[generator.integers(len(scene.things))])
        pose, closes = start_pose(generator), False
        while not (closes and pose[6] == 0):
            found.append(table_expert(pose, goal))
            closes = bool(found[-1][6] == 0 and pose[6] >= 0.5)
            pose = moved(pose, found[-1], generator)
    low, high = np.quantile(np.stack(found), [0.01, 0.99], axis=0)
    return {
        "q01": [round(float(value), 6) for value in low],
        "q99": [round(float(value), 6) for value in high],
        "mask": [True] * 6 + [False],
    }
