"""Intervals, paired counts, certificates, and the rows of a race of episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mmspec
from mmspec import bench
from mmspec.modalities.vla import PolicySettings
from mmspec.modalities.vla.formatting import PolicyFormatter
from mmspec.modalities.vla.measures import workload
from mmspec.modalities.vla.plug import load
from mmspec.modalities.vla.quality import extras, mcnemar, wilson
from mmspec.modalities.vla.step_stats import percentile
from mmspec.modality import Selection
from tests.covering import limited
from tests.modalities.vla.policies import policy, processor


def test_wilson_and_mcnemar() -> None:
    low, high = wilson(8, 10)  # Newcombe 1998: 0.4901625, 0.9433178
    assert (low, high) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611252), abs=1e-6)
    mine = [True] * 9 + [False] * 3
    other = [True] * 4 + [False] * 5 + [True] + [False] * 2
    found = mcnemar(mine, other)
    assert (found["only this"], found["only plain"]) == (5, 1)
    assert found["p"] == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar(mine, mine)["p"] == 1.0


def test_percentiles_are_of_the_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (1, 20, 50, 99, 100)] == [1, 1, 3, 5, 5]


@pytest.mark.parametrize("name", limited(["prompt-lookup", "coupled"], 1))
def test_exact_recipes_pass_on_tiny_policies(name: str) -> None:
    found = bench.certify(name, modality="vla", seeds=4, samples=500)
    outcomes = {one.name: one.outcome for one in found.checks}
    assert found.verdict == "exact"
    assert outcomes["frequencies"] == outcomes["seeded equality"] == "passed"
    assert outcomes["greedy equality"] == "passed"


@pytest.mark.exhaustive
def test_a_lossy_recipe_is_found_out_on_tiny_policies() -> None:
    found = bench.certify("typical", modality="vla", seeds=2, samples=500)
    assert found.verdict == "lossy"
    assert "lossy" in {one.outcome for one in found.checks}


@pytest.mark.exhaustive
def test_a_certificate_asks_episodes(tmp_path: Path) -> None:
    model, formatter = loaded(tmp_path)
    work = workload(model, formatter, formatter.settings, Selection(None, 2, 1, seed=5))
    fast = mmspec.accelerate(model, "hold-last")
    found = bench.certify("hold-last", fast, list(work.timed), seeds=2, samples=500)
    assert found.verdict == "exact"
    details = {one.name: one.detail for one in found.checks}
    assert details["greedy equality"].startswith("2 of 2 outputs")
    assert details["seeded equality"].startswith("2 of 2 seeds")


def loaded(folder: Path) -> tuple[Any, PolicyFormatter]:
    policy().save_pretrained(folder)
    processor().save_pretrained(folder)
    model = load(folder)
    return model, PolicyFormatter(str(folder), model, PolicySettings(steps=2, episodes=2))


@pytest.mark.exhaustive
def test_a_race_of_episodes(tmp_path: Path) -> None:
    model, formatter = loaded(tmp_path)
    work = workload(model, formatter, formatter.settings, Selection(None, 9, 1, seed=5))
    ways = {"prompt-lookup": mmspec.accelerate(model, "prompt-lookup")}
    found = bench.compare("toy", ways, work, repeats=1, seed=5, controls=True)
    rows = {one.recipe: one for one in (*found.rows, *found.baselines, *found.controls)}
    assert found.requests == 2
    for name in ("plain", "generate", "prompt-lookup", "constant drafter"):
        assert rows[name].identical == 1
        assert rows[name].extras["McNemar"] == {"only this": 0, "only plain": 0, "p": 1.0}
        assert rows[name].extras["steps"] == 2
    assert rows["hold_last"].identical == 1
    assert rows["hold_last_tolerance"].exact is False
    assert rows["plain"].calls == rows["generate"].calls == 6
    assert rows["prompt-lookup"].qualities["largest action error"]["value"] == 0


def test_episodes_side_by_side_are_the_same_episodes(tmp_path: Path) -> None:
    model, formatter = loaded(tmp_path)
    settings = PolicySettings(steps=2, episodes=3)
    alone, together = (
        workload(model, formatter, settings, Selection(None, 9, batch, seed=5)) for batch in (1, 2)
    )
    assert [len(one["environment"]) for one in together.timed] == [2, 1]
    assert [one["episode"] for one in together.timed] == [5, 7]
    runners = [
        (work, one) for work in (alone, together) for one in (work.plain, *work.baselines.values())
    ]
    results = [[one.run(request, 0) for request in work.timed] for work, one in runners]
    for found in results[1:]:
        assert [tokens for one in found for tokens in one.values] == [
            tokens for one in results[0] for tokens in one.values
        ]
        assert sum(one.count for one in found) == 6
        assert all(one.calls == 6 for one in found)
        made = extras(found, {"plain": results[0]})
        assert made["McNemar"] == {"only this": 0, "only plain": 0, "p": 1.0}
        assert made["steps"] == 2
