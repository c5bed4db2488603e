"""Training frames of the policy: pictures of the arm, with the expert's action for each goal.

Poses are those of the expert under random perturbations, so that the policy learns to recover
(noise injection, after DART, Laskey et al. 2017). Each picture has several instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmspec.modalities.vla.worlds.arm import HIGHEST, LOWEST, SIDE, apply_action, tilt
from mmspec.modalities.vla.worlds.expert import table_expert
from mmspec.modalities.vla.worlds.table import format_instruction, position, render_pose, start_pose
from mmspec.training.fitting import TrainingRun
from mmspec.zoo.language import scenes
from mmspec.zoo.scene import Scene
from tools.zoo.vla.architecture import PIXELS

_LONGEST = 40  # steps of a perturbed expert
_PUSHES, _PUSH = 0.12, np.array([0.03, 0.03, 0.02, 0.0, 0.0, 0.2])
_ANYWHERE = 0.15  # share of random poses


@dataclass(frozen=True)
class TableFrames:
    """images: (N, P, P, 3) bytes; poses: (N, 7).

    Per picture, the approached goal first: instructions, goals (n, 2) in metres, the expert's
    actions (n, 7).
    """

    images: np.ndarray
    poses: np.ndarray
    scenes: list[Scene]  # of each picture
    instructions: list[list[str]]
    goals: list[np.ndarray]
    actions: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.images)


def make_frames(count: int, each: int, run: TrainingRun) -> TableFrames:
    """`each` pictures of every of `count` training scenes."""
    generator = np.random.default_rng((run.seed, 12))
    total = count * each
    images = np.zeros((total, PIXELS, PIXELS, 3), np.uint8)
    poses, frame_scenes = np.zeros((total, 7)), []
    instructions: list[list[str]] = []
    goals: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    for number, (scene, _) in enumerate(scenes(count, "train", run.seed)):
        table = scene.render(PIXELS)
        for turn in range(each):
            order = [scene.things[i] for i in generator.permutation(len(scene.things))]
            places = np.array([position(thing) for thing in order])
            pose = sample_pose(tuple(places[0]), generator)
            at = number * each + turn
            images[at], poses[at] = np.array(render_pose(table, pose)), pose
            frame_scenes.append(scene)
            instructions.append([format_instruction(thing) for thing in order])
            goals.append(places)
            actions.append(np.stack([table_expert(pose, tuple(goal)) for goal in places]))
        run.progress("draw", number + 1, count, float("nan"))
    return TableFrames(images, poses, frame_scenes, instructions, goals, actions)


def sample_pose(goal: tuple[float, float], generator: np.random.Generator) -> np.ndarray:  # -> (7,)
    """A pose of a perturbed expert, or sometimes a random one.

    The tilt of the wrist is the required one, since it is not visible: a policy cannot learn to
    correct it.
    """
    pose = _sample_pushed_pose(goal, generator).copy()
    x, y, z = (float(value) for value in pose[:3])
    pose[3:5] = tilt(x, y, z)
    return pose


def _sample_pushed_pose(goal: tuple[float, float], generator: np.random.Generator) -> np.ndarray:
    pose = start_pose(generator)
    if generator.random() < _ANYWHERE:
        pose[2] = generator.uniform(LOWEST, HIGHEST)
        pose[6] = generator.integers(3) / 2
        return pose
    trail = [pose]
    for _ in range(_LONGEST):
        action = table_expert(pose, goal)
        closes = action[6] == 0 and pose[6] >= 0.5
        pose = apply_action(pose, action, generator)
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


def action_statistics(seed: int, count: int = 400) -> dict[str, list[float] | list[bool]]:
    """q01, q99 and mask of the expert's actions over undisturbed episodes."""
    generator = np.random.default_rng((seed, 13))
    found = []
    for scene, _ in scenes(count, "train", seed):
        goal = position(scene.things[generator.integers(len(scene.things))])
        pose, closes = start_pose(generator), False
        while not (closes and pose[6] == 0):
            found.append(table_expert(pose, goal))
            closes = bool(found[-1][6] == 0 and pose[6] >= 0.5)
            pose = apply_action(pose, found[-1], generator)
    low, high = np.quantile(np.stack(found), [0.01, 0.99], axis=0)
    return {
        "q01": [round(float(value), 6) for value in low],
        "q99": [round(float(value), 6) for value in high],
        "mask": [True] * 6 + [False],
    }
