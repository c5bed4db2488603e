"""The engine beside its baselines: counts are measured, latencies follow from the order."""

from __future__ import annotations

from typing import Any

import pytest

import mmspec
from mmspec.bench.studies.arrivals import make_ragged
from mmspec.bench.studies.serving import ALONE, BATCHES, ENGINE, LIBRARY, measure_serving
from tests import toys
from tests.partners import noisy


@pytest.mark.slow  # transformers' continuous batching takes most of its time
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


@pytest.mark.exhaustive
def test_ragged_outputs_at_random_times() -> None:
    """The engine and servers of both kinds of batches give the same tokens."""
    fast = mmspec.accelerate(toys.model("llama"), "coupled", drafter=noisy("llama"))
    requests = [
        {**toys.inputs("llama", seed=seed), "max_new_tokens": 16, "do_sample": False}
        for seed in range(12)
    ]
    limits = {"concurrencies": (8,), "rates_hz": (200.0,), "ragged": True}
    found = measure_serving(fast, requests, [requests[0]], model="toy", **limits)  # type: ignore[arg-type]
    points = {(one.method, one.rate_hz): one for one in found.points}
    methods = {(method, rate) for method in (ENGINE, ALONE, BATCHES) for rate in (None, 200.0)}
    assert points.keys() == methods
    lengths = [one["max_new_tokens"] for one in make_ragged(requests, 0)]
    assert min(lengths) < 4
    assert max(lengths) > 16
    for point in points.values():
        assert point.identical == 1
        assert point.tokens == sum(lengths)
        first = point.first_token_percentile(50)
        assert first is not None
        assert 0 < first <= point.percentile(50)
    assert "differ" in found.skipped[LIBRARY]
