"""Times taken fairly: everybody answers the same requests, in turns, several times over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from mmspec.bench.environment import seconds
from mmspec.bench.players import Answer, Inputs, Player
from mmspec.bench.progress import Progress, silent

FAILURES = (ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError)


@dataclass
class Laps:
    """One player's seconds: `whole[r][i]` is request i in repeat r; `first` with one token."""

    name: str
    whole: list[list[float]] = field(default_factory=list)
    first: list[list[float]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)  # of the last repeat, per request

    def start(self) -> None:
        """Begin another repeat."""
        self.whole.append([])
        self.first.append([])
        self.answers = []

    def add(self, first: tuple[float, Answer], whole: tuple[float, Answer]) -> None:
        """Note one request: a one-token call, and all of it."""
        self.first[-1].append(first[0])
        self.whole[-1].append(whole[0])
        self.answers.append(whole[1])

    @property
    def tokens(self) -> int:
        return sum(answer.count for answer in self.answers)

    def per_token(self) -> list[float]:
        """Seconds per new token, of each repeat."""
        return [sum(lap) / max(self.tokens, 1) for lap in self.whole]

    def per_later_token(self) -> list[float]:
        """Seconds per new token but the first of each row, without the time of a one-token call."""
        rows = sum(len(answer.tokens) for answer in self.answers)
        later = max(self.tokens - rows, 1)
        pairs = zip(self.whole, self.first, strict=True)
        return [max(sum(lap) - sum(first), 1e-9) / later for lap, first in pairs]


@dataclass(frozen=True)
class Race:
    """Everybody's laps, and why some could not finish."""

    laps: dict[str, Laps]
    failed: dict[str, str]


@dataclass(frozen=True)
class Ratio:
    """A ratio measured in every repeat: its median and its extremes."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio:
        values = [a / b for a, b in zip(above, below, strict=True)]
        return cls(median(values), min(values), max(values))

    @property
    def spread(self) -> list[float]:
        return [self.least, self.most]


def race(
    players: Sequence[Player],
    requests: Sequence[Inputs],
    room: int,
    repeats: int = 5,
    progress: Progress = silent,
    may_fail: frozenset[str] = frozenset(),
) -> Race:
    """Let everybody answer everything, `repeats` times after a warm-up; who starts changes.

    Players in `may_fail` leave the race with their first error; errors of others are raised.
    """
    running, failed = list(players), dict[str, str]()
    laps = {player.name: Laps(player.name) for player in players}

    def attempt(player: Player, inputs: Inputs, *rooms: int) -> list[tuple[float, Answer]]:
        try:
            return [timed(player, inputs, room) for room in rooms]
        except FAILURES as error:
            if player.name not in may_fail:
                raise
            failed[player.name] = f"{type(error).__name__}: {error}"
            running.remove(player)
            del laps[player.name]
            return []

    for player in players:
        attempt(player, requests[0], room)
    for repeat in range(repeats):
        for lap in laps.values():
            lap.start()
        for index, inputs in enumerate(requests):
            turn = (repeat + index) % len(running)
            for player in [*running[turn:], *running[:turn]]:
                times = attempt(player, inputs, 1, room)
                if times:
                    laps[player.name].add(*times)
            progress("measure", repeat * len(requests) + index + 1, repeats * len(requests))
    return Race(laps, failed)


def timed(player: Player, inputs: Inputs, room: int) -> tuple[float, Answer]:
    """One answer and the seconds it took."""
    device: torch.device = inputs["input_ids"].device
    start = seconds(device)
    answer = player.answer(inputs, room)
    return seconds(device) - start, answer
