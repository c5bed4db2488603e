"""How much of a run's wall time its forwards alone would have needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from mmspec.api import Accelerated
from mmspec.bench.environment import seconds
from mmspec.bench.forwards import Replay, recording, replay
from mmspec.bench.players import Answer, Inputs
from mmspec.bench.progress import Progress, silent


class Runner(Protocol):
    """Answers requests with an accelerated model."""

    @property
    def fast(self) -> Accelerated: ...
    def answer(self, inputs: Inputs, room: int) -> Answer: ...


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
    players: Sequence[Runner],
    requests: Sequence[Inputs],
    room: int,
    repeats: int = 5,
    progress: Progress = silent,
) -> list[Efficiency]:
    """Run and replay in turns, request by request, all players side by side."""
    wall, alone = [0.0] * len(players), [0.0] * len(players)
    for done, inputs in enumerate(requests):
        for index, pairs in enumerate(run_and_replay(players, inputs, room, repeats)):
            wall[index] += median(run for run, _ in pairs)
            alone[index] += median(forwards.total for _, forwards in pairs)
        progress("forwards alone", done + 1, len(requests))
    return [Efficiency(*times) for times in zip(wall, alone, strict=True)]


def run_and_replay(
    players: Sequence[Runner], inputs: Inputs, room: int, repeats: int
) -> list[list[tuple[float, Replay]]]:
    """Per player, `repeats` times: wall seconds of a run, and its forwards alone; warmed up."""
    device = players[0].fast.session.bound.backbone.device
    tapes = []
    for player in players:
        with recording(player.fast) as tape:
            player.answer(inputs, room)
        replay(tape, device)
        tapes.append(tape)
    pairs: list[list[tuple[float, Replay]]] = [[] for _ in players]
    for _ in range(repeats):
        for player, tape, found in zip(players, tapes, pairs, strict=True):
            start = seconds(device)
            player.answer(inputs, room)
            found.append((seconds(device) - start, replay(tape, device)))
    return pairs
