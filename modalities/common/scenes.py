"""Pictures of the Scene world on order: what modalities share that draw by words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mmspec.bench.workload import Scored, facts_right, grouped
from mmspec.modality import Quality, RunResult
from mmspec.zoo.prompts import prompts
from mmspec.zoo.reading import read_all, score_picture
from mmspec.zoo.scene import Scene


def held_out(count: int, batch: int, seed: int) -> tuple[list[list[str]], list[Scene]]:
    """Held-out prompts in whole batches, and the scenes that they describe."""
    groups = grouped(prompts(count, seed=seed), batch)
    scenes = [one.scene for group in groups for one in group]
    return [[one.text for one in group] for group in groups], scenes


def facts(scenes: Sequence[Scene], pictures: Sequence[Any]) -> list[tuple[int, int]]:
    """Facts right and facts asked of every picture."""
    shown = read_all(pictures)
    return [score_picture(scene, one) for scene, one in zip(scenes, shown, strict=True)]


def judged_by(score: Callable[[Sequence[Any]], Scored]) -> Quality:
    """Facts right in the pictures of all answers, in order; `output` of an answer has them."""

    def scored(answers: Sequence[RunResult]) -> Scored:
        return score([picture for answer in answers for picture in answer.output])

    return facts_right(scored)
