"""How much of a run's wall time its forwards alone would have needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from mmspec.bench.environment import seconds
from mmspec.bench.forwards import Replay, recording, replay
from mmspec.bench.progress import Progress, silent
from mmspec.modality import Runner


@dataclass(frozen=True)
class Efficiency:
    """Medians over repeats, summed over requests, in seconds."""

    wall: float
    forwards: float

    @property
    def share(self) -> float:
        """Engine efficiency: 1 = nothing but forwards."""
        return self.forwards / self.wall if self.wall else 0.0


def efficiencies(
    contestants: Mapping[str, Runner],
    requests: Sequence[Mapping[str, Any]],
    repeats: int,
    seed: int,
    device: torch.device,
    progress: Progress = silent,
) -> dict[str, Efficiency]:
    """Run and replay in turns, request by request, all contestants side by side."""
    names, wall, alone = list(contestants), [0.0] * len(contestants), [0.0] * len(contestants)
    for done, request in enumerate(requests):
        found = run_and_replay(list(contestants.values()), request, repeats, seed + done, device)
        for index, pairs in enumerate(found):
            wall[index] += median(run for run, _ in pairs)
            alone[index] += median(forwards.total for _, forwards in pairs)
        progress("forwards alone", done + 1, len(requests))
    both = zip(names, wall, alone, strict=True)
    return {name: Efficiency(run, forwards) for name, run, forwards in both}


def run_and_replay(
    contestants: Sequence[Runner],
    request: Mapping[str, Any],
    repeats: int,
    seed: int,
    device: torch.device,
) -> list[list[tuple[float, Replay]]]:
    """Each one's wall seconds of a run and its forwards alone, `repeats` times; warmed up."""
    tapes = []
    for one in contestants:
        one.run_first_token(request, seed)  # what an engine checks once is no part of a run
        with recording(one) as tape:
            one.run(request, seed)
        replay(tape, device)
        tapes.append(tape)
    pairs: list[list[tuple[float, Replay]]] = [[] for _ in contestants]
    for _ in range(repeats):
        for one, tape, found in zip(contestants, tapes, pairs, strict=True):
            start = seconds(device)
            one.run(request, seed)
            found.append((seconds(device) - start, replay(tape, device)))
    return pairs
