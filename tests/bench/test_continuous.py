"""The benchmark of continuous tokens, on tiny models."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest

from mmspec.api import accelerate
from mmspec.bench.continuous import compare_continuous
from mmspec.bench.gallery import Gallery
from tests.toys.mar import mar

SETTINGS: dict[str, Any] = {"steps": 6, "head_steps": 3, "guidance": 1.5, "last_noise": True}
VAE = SimpleNamespace(decode=lambda latents: latents.repeat(1, 2, 1, 1)[:, :3])


def test_recipes_beside_plain_and_wider_steps() -> None:
    model = mar()
    ways = {
        "cspd-coupled": accelerate(model, drafter=copy.deepcopy(model), length=2),
        "cspd": accelerate(model, "cspd", drafter=mar(1), length=3, prefill=0),
    }
    timed = [{"class_labels": [0]}, {"class_labels": [3]}]
    judged = [{"class_labels": [0, 1, 2]}]
    seen: list[int] = []

    def judge(images: Any) -> list[tuple[int, int]]:
        seen.append(len(images))
        return [(index % 2, 1) for index, _ in enumerate(images)]

    gallery = Gallery(timed, judged, judge)
    found = compare_continuous(ways, gallery, SETTINGS, VAE, names=("m", "d"), repeats=2)
    rows = {row.recipe: row for row in found.rows}
    assert list(rows) == ["plain", "plain, 2 steps", "cspd-coupled", "cspd"] or len(rows) == 5
    assert rows["plain"].calls == 6
    assert rows["plain"].speedup_over_plain == 1
    assert rows["cspd-coupled"].calls == 2  # a copy: two steps and one more, twice
    assert rows["plain, 2 steps"].calls == 2
    assert [rows[name].exact for name in ("plain", "plain, 2 steps", "cspd-coupled", "cspd")] == [
        True,
        False,
        True,
        False,
    ]
    assert rows["cspd-coupled"].draft_acceptance_rate == 1
    assert rows["cspd-coupled"].mean_acceptance_length == 3
    assert seen == [3] * len(rows)
    assert all(row.facts_right == pytest.approx(1 / 3) for row in found.rows)
    assert all(row.facts_gap == 0 for row in found.rows)
    assert found.pictures == 3
    assert json.loads(json.dumps(found.to_dict()))["steps"] == 6


def test_nothing_is_judged_without_a_judge() -> None:
    model = mar()
    ways = {"cspd-coupled": accelerate(model, drafter=mar(1), length=1)}
    found = compare_continuous(ways, Gallery([{"class_labels": [2]}]), SETTINGS, repeats=1)
    assert found.rows[0].facts_right is None
    assert found.rows[-1].facts_gap is None
    assert found.pictures == 1
