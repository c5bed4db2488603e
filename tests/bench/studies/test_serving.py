"""The engine beside its baselines: counts are measured, latencies follow from the order."""

from __future__ import annotations

from typing import Any

import pytest

import mmspec
from mmspec.bench.studies.serving import ALONE, BATCHES, ENGINE, LIBRARY, measure_serving
from tests import toys
from tests.partners import noisy


def test_every_method_decodes_the_same_tokens() -> None:
    fast = mmspec.accelerate(toys.model("llama"), "coupled", drafter=noisy("llama"))
    new: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    batches = [{**toys.inputs("llama", seed=seed, batch=8), **new} for seed in range(2)]
    requests = [
        {"input_ids": one["input_ids"][row : row + 1], **new} for one in batches for row in range(8)
    ]
    found = measure_serving(fast, requests, batches, model="toy", concurrencies=(1, 8))
    points = {(one.method, one.concurrency): one for one in found.points}
    assert {(ENGINE, 1), (ENGINE, 8), (ALONE, 1), (ALONE, 8), (BATCHES, 8)} <= points.keys()
    for (method, _), point in points.items():
        assert point.tokens == 16 * 6
        assert len(point.latencies) == 16
        assert method == LIBRARY or point.percentile(50) <= point.percentile(99)
    assert points[ENGINE, 8].identical == points[ENGINE, 1].identical == 1
    assert points[ENGINE, 1].rows_per_round == pytest.approx(1)
    assert points[ENGINE, 8].rows_per_round > 2  # type: ignore[operator]
    assert points[ALONE, 8].percentile(50) > 4 * points[ALONE, 1].percentile(50)
    assert (LIBRARY in found.skipped) != ((LIBRARY, 16) in points)
    assert found.to_dict()["points"][0]["tokens_per_second"] > 0
