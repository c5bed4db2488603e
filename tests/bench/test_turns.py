"""Everybody draws everything, in turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from mmspec.bench.turns import Drawn, race

CPU = torch.device("cpu")


class Scribe:
    """Writes down who was asked for what."""

    def __init__(self, name: str, log: list[tuple[str, int, int]], fails: bool = False) -> None:
        self.name, self.log, self.fails = name, log, fails

    def draw(self, asked: Mapping[str, Any], seed: int) -> Drawn:
        if self.fails:
            raise ValueError("no brush")
        self.log.append((self.name, asked["number"], seed))
        return Drawn(f"{self.name} {asked['number']}", seed)


def test_who_starts_changes_and_seeds_belong_to_requests() -> None:
    log: list[tuple[str, int, int]] = []
    players = {name: Scribe(name, log) for name in "ab"}
    laps, failed = race(players, [{"number": 0}, {"number": 1}], 2, 7, CPU)
    warm, rest = log[:2], log[2:]
    assert warm == [("a", 0, 7), ("b", 0, 7)]
    assert [name for name, _, _ in rest] == ["a", "b", "b", "a", "b", "a", "a", "b"]
    assert {(number, seed) for _, number, seed in rest} == {(0, 7), (1, 8)}
    assert (laps["b"].pictures, laps["b"].stats) == (["b 0", "b 1"], [7, 8])
    assert len(laps["a"].seconds) == 2
    assert not failed


def test_guests_may_fail_and_others_not() -> None:
    players = {"a": Scribe("a", []), "guest": Scribe("guest", [], fails=True)}
    laps, failed = race(players, [{"number": 0}], 1, 0, CPU, may_fail=frozenset({"guest"}))
    assert (set(laps), failed) == ({"a"}, {"guest": "ValueError: no brush"})
    with pytest.raises(ValueError, match="no brush"):
        race(players, [{"number": 0}], 1, 0, CPU)
