"""Does a round cost more as the context grows, beyond attention itself?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from mmspec import recipes
from mmspec.api import Accelerated, accelerate
from mmspec.bench.environment import dtype_name, environment, seconds
from mmspec.bench.forwards import stopwatch
from mmspec.bench.progress import Progress, silent
from mmspec.bench.studies.shapes import FixedLength, build
from mmspec.bench.workload import random_prompt
from mmspec.drafters.oracle import Oracle


@dataclass(frozen=True)
class GrowthPoint:
    """Medians per round after the prefill, at one context length."""

    context: int
    rounds: int
    round_seconds: float
    forward_seconds: float  # of all models' calls within

    @property
    def host_seconds(self) -> float:
        return self.round_seconds - self.forward_seconds


@dataclass(frozen=True)
class Growth:
    """What `mmspec bench --growth` reports: host time per round, longest context over shortest."""

    points: list[GrowthPoint]
    ratio: float
    spread: list[float]
    environment: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        points = [{**asdict(point), "host_seconds": point.host_seconds} for point in self.points]
        return {**asdict(self), "points": points}


def growth(
    contexts: tuple[int, ...] = (512, 4096),
    *,
    shape: str = "probe",
    room: int = 192,
    repeats: int = 5,
    acceptance: float = 0.8,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = silent,
) -> Growth:
    """Measure long random prompts on a small text model.

    The contexts take turns round by round, so that other work on the machine hits all alike, and
    forwards are timed where they happen: in isolation they differ by more than the host time that
    is looked for, as caches go. The model is small enough to leave the processor's cache to the
    host.
    """
    place = torch.device(device)
    model = build(shape, place, torch.float32, max(contexts) + room + 64, seed)
    cases = [_case(model, context, room, acceptance, seed) for context in contexts]
    found: list[list[list[Turn]]] = []  # [repeat][context][round]
    for repeat in range(repeats + 1):
        found.append(_turns(cases, room))
        progress("measure", repeat + 1, repeats + 1)
    found = found[1:]  # the first warmed up
    points = [
        _point(context, [turn for repeat in found for turn in repeat[index]])
        for index, context in enumerate(contexts)
    ]
    hosts = [[_point(0, turns).host_seconds for turns in repeat] for repeat in found]
    ratios = [host[-1] / host[0] for host in hosts]
    where = {**environment(place), "dtype": dtype_name(model.dtype)}
    ratio = points[-1].host_seconds / points[0].host_seconds
    return Growth(points, ratio, [min(ratios), max(ratios)], where)


Turn = tuple[float, float]  # seconds of a round, and of the forwards within
_Case = tuple[Accelerated, Mapping[str, Any]]


def _case(model: Any, context: int, room: int, acceptance: float, seed: int) -> _Case:
    """A prompt, and a drafter that knows the answer."""
    place = model.get_input_embeddings().weight.device
    inputs = random_prompt(model.config.vocab_size, context, place, seed=seed)
    known = FixedLength(accelerate(model, "plain"), room).run(inputs)
    oracle = Oracle(known.values, 1 - acceptance, seed=seed)
    return accelerate(model, recipes.get("plain"), drafter=oracle), inputs


def _turns(cases: Sequence[_Case], room: int) -> list[list[Turn]]:
    """All rounds after the prefill, the cases in turns."""
    turns: list[list[Turn]] = [[] for _ in cases]
    device = cases[0][0].model.device
    running = [
        fast.stream(**inputs, do_sample=False, max_new_tokens=room) for fast, inputs in cases
    ]
    for rounds in running:
        next(rounds)
    with stopwatch(cases[0][0], device) as spent:  # all cases share one model
        while True:
            for rounds, case in zip(running, turns, strict=True):
                spent.clear()
                start = seconds(device)
                if next(rounds, None) is None:
                    return turns
                case.append((seconds(device) - start, sum(spent)))


def _point(context: int, turns: Sequence[Turn]) -> GrowthPoint:
    whole = median(whole for whole, _ in turns)
    host = median(whole - forwards for whole, forwards in turns)
    return GrowthPoint(context, len(turns), whole, whole - host)
