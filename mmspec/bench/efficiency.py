"""Engine efficiency: the share of the wall time that the forwards alone need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from mmspec.bench.forwards import Replay, record_forwards, replay
from mmspec.bench.reporting import Progress, read_clock, silent
from mmspec.modality import Runner


@dataclass(frozen=True)
class Efficiency:
    """Seconds, medians over repeats, summed over requests."""

    wall: float
    forwards: float

    @property
    def share(self) -> float:
        """Engine efficiency; 1 = forwards only."""
        return self.forwards / self.wall if self.wall else 0.0


def measure_efficiency(
    runners: Mapping[str, Runner],
    requests: Sequence[Mapping[str, Any]],
    repeats: int,
    seed: int,
    device: torch.device,
    progress: Progress = silent,
) -> dict[str, Efficiency]:
    """Run and replay all runners in turns, request by request."""
    names, wall, alone = list(runners), [0.0] * len(runners), [0.0] * len(runners)
    for done, request in enumerate(requests):
        found = run_and_replay(list(runners.values()), request, repeats, seed + done, device)
        for index, pairs in enumerate(found):
            wall[index] += median(run for run, _ in pairs)
            alone[index] += median(forwards.total for _, forwards in pairs)
        progress("forwards alone", done + 1, len(requests))
    both = zip(names, wall, alone, strict=True)
    return {name: Efficiency(run, forwards) for name, run, forwards in both}


def run_and_replay(
    runners: Sequence[Runner],
    request: Mapping[str, Any],
    repeats: int,
    seed: int,
    device: torch.device,
) -> list[list[tuple[float, Replay]]]:
    """Return (wall seconds, replay) of every runner, `repeats` times, after a warm-up."""
    tapes = []
    for one in runners:
        one.run_first_token(request, seed)  # one-time checks of an engine are not timed
        with record_forwards(one) as tape:
            one.run(request, seed)
        replay(tape, device)
        tapes.append(tape)
    pairs: list[list[tuple[float, Replay]]] = [[] for _ in runners]
    for _ in range(repeats):
        for one, tape, found in zip(runners, tapes, pairs, strict=True):
            start = read_clock(device)
            one.run(request, seed)
            found.append((read_clock(device) - start, replay(tape, device)))
    return pairs
