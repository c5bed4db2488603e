"""Host time per round over the context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from mmspec import recipes
from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench.forwards import time_forwards
from mmspec.bench.reporting import Progress, describe_environment, dtype_name, read_clock, silent
from mmspec.bench.studies.shapes import FixedLength, build_model, parse_device, random_prompt
from mmspec.drafters.oracle import Oracle


@dataclass(frozen=True)
class GrowthPoint:
    """Medians per round after the prefill, at one context length."""

    context: int
    rounds: int
    round_seconds: float
    forward_seconds: float  # of all model calls in the round

    @property
    def host_seconds(self) -> float:
        return self.round_seconds - self.forward_seconds


@dataclass(frozen=True)
class Growth:
    """The report of `mmspec bench --growth`: host time per round, longest over shortest context."""

    points: list[GrowthPoint]
    ratio: float
    spread: list[float]
    environment: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        points = [{**asdict(point), "host_seconds": point.host_seconds} for point in self.points]
        return {**asdict(self), "points": points}


def growth(
    contexts: tuple[int, ...] = (512, 4096),
    *,
    shape: str = "probe",
    max_new_tokens: int = 192,
    repeats: int = 5,
    acceptance: float = 0.8,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress = silent,
) -> Growth:
    """Measure long random prompts on a small text model.

    The contexts take turns round by round, so that other load on the machine affects all alike.
    Forwards are timed within the run: in isolation they differ by more than the host time to be
    measured. The model is small enough to leave the processor's cache to the host code.
    """
    place = parse_device(device)
    model = build_model(shape, place, torch.float32, max(contexts) + max_new_tokens + 64, seed)
    cases = [_case(model, context, max_new_tokens, acceptance, seed) for context in contexts]
    found: list[list[list[Turn]]] = []  # [repeat][context][round]
    for repeat in range(repeats + 1):
        found.append(_turns(cases, max_new_tokens))
        progress("measure", repeat + 1, repeats + 1)
    found = found[1:]  # without the warm-up
    points = [
        _point(context, [turn for repeat in found for turn in repeat[index]])
        for index, context in enumerate(contexts)
    ]
    hosts = [[_point(0, turns).host_seconds for turns in repeat] for repeat in found]
    ratios = [host[-1] / host[0] for host in hosts]
    where = {**describe_environment(place), "dtype": dtype_name(model.dtype)}
    ratio = points[-1].host_seconds / points[0].host_seconds
    return Growth(points, ratio, [min(ratios), max(ratios)], where)


Turn = tuple[float, float]  # seconds of a round, and of the forwards within
_Case = tuple[Accelerated, Mapping[str, Any]]


def _case(model: Any, context: int, max_new_tokens: int, acceptance: float, seed: int) -> _Case:
    """Return an accelerated model with an oracle drafter, and a prompt."""
    place = model.get_input_embeddings().weight.device
    inputs = random_prompt(model.config.vocab_size, context, place, seed=seed)
    result = FixedLength(accelerate(model, "plain"), max_new_tokens).run(inputs)
    oracle = Oracle(result.values, 1 - acceptance, seed=seed)
    return accelerate(model, recipes.get("plain"), drafter=oracle), inputs


def _turns(cases: Sequence[_Case], max_new_tokens: int) -> list[list[Turn]]:
    """Time all rounds after the prefill, the cases in turns."""
    turns: list[list[Turn]] = [[] for _ in cases]
    device = cases[0][0].model.device
    running = [
        fast.stream(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        for fast, inputs in cases
    ]
    for rounds in running:
        next(rounds)
    with time_forwards(cases[0][0], device) as spent:  # all cases share one model
        while True:
            for rounds, case in zip(running, turns, strict=True):
                spent.clear()
                start = read_clock(device)
                if next(rounds, None) is None:
                    return turns
                case.append((read_clock(device) - start, sum(spent)))


def _point(context: int, turns: Sequence[Turn]) -> GrowthPoint:
    whole = median(whole for whole, _ in turns)
    host = median(whole - forwards for whole, forwards in turns)
    return GrowthPoint(context, len(turns), whole, whole - host)
