"""Everybody draws the same, in turns, several times over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mmspec.bench.environment import seconds
from mmspec.bench.progress import Progress, silent
from mmspec.bench.timing import FAILURES


@dataclass(frozen=True)
class Drawn:
    """What came out for one request, and what is known of how."""

    pictures: Any
    stats: Any = None


class Player(Protocol):
    """Draws what is asked, all noise from `seed`."""

    def draw(self, asked: Mapping[str, Any], seed: int) -> Drawn: ...


@dataclass
class Laps:
    """Seconds of each repeat, and what was drawn in the last, per request."""

    seconds: list[float] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)

    @property
    def pictures(self) -> list[Any]:
        return [one.pictures for one in self.drawn]

    @property
    def stats(self) -> list[Any]:
        return [one.stats for one in self.drawn]


def race(
    players: Mapping[str, Player],
    requests: Sequence[Mapping[str, Any]],
    repeats: int,
    seed: int,
    device: torch.device,
    progress: Progress = silent,
    may_fail: frozenset[str] = frozenset(),
) -> tuple[dict[str, Laps], dict[str, str]]:
    """Let everybody draw everything after a warm-up; who starts changes. Request i has seed + i.

    Players in `may_fail` who fail the warm-up take no part; why is returned beside the laps.
    """
    failed: dict[str, str] = {}
    for name, player in players.items():
        try:
            player.draw(requests[0], seed)
        except FAILURES as error:
            if name not in may_fail:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
    running = [name for name in players if name not in failed]
    laps = {name: Laps() for name in running}
    for repeat in range(repeats):
        for lap in laps.values():
            lap.seconds.append(0.0)
            lap.drawn = []
        for index, asked in enumerate(requests):
            turn = (repeat + index) % len(running)
            for name in [*running[turn:], *running[:turn]]:
                begun = seconds(device)
                laps[name].drawn.append(players[name].draw(asked, seed + index))
                laps[name].seconds[-1] += seconds(device) - begun
            progress("measure", repeat * len(requests) + index + 1, repeats * len(requests))
    return laps, failed
