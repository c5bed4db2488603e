"""The benchmark reports what it promises, and its peers leave nothing behind."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

import mmspec
from mmspec.bench import Workload, compare, growth, scale
from mmspec.bench.players import Answer, Assisted, Generate, Speculative, new_tokens
from mmspec.bench.pool import histogram, tokens_per_target_call
from mmspec.bench.timing import Ratio, race
from mmspec.bench.workload import agreement
from tests import toys

GREEDY = {"do_sample": False}
KEYS = (
    *("recipe", "model", "speedup_end_to_end", "speedup_decode", "mean_acceptance_length"),
    *("acceptance_histogram", "tokens_per_target_call", "draft_share", "verify_share"),
    *("host_share", "engine_efficiency", "ideal_speedup", "exact", "quality_target"),
    *("quality_method", "peers", "spread", "environment"),
)


def pair(family: str = "llava") -> tuple[Any, Any]:
    return toys.model(family), toys.model(family, seed=1)


def test_a_comparison_has_every_key() -> None:
    target, drafter = pair()
    requests = [toys.inputs("llava", seed) for seed in range(2)]
    found = compare(target, "coupled", drafter, Workload(requests), room=8, repeats=2)
    document = json.loads(json.dumps(found.to_dict()))
    assert not [key for key in KEYS if key not in document]
    assert document["exact"] is True
    assert document["identical"] == 1
    assert document["quality_method"] == document["quality_target"] == 1
    assert document["peers"]["generate"]["speedup_end_to_end"] == 1
    assert document["peers"]["generate"]["tokens_per_target_call"] == 1
    for peer in ("assisted_as_shipped", "assisted"):
        assert document["peers"][peer]["tokens_per_target_call"] >= 1
        assert document["peers"][peer]["identical"] == 1
    assert sum(document["acceptance_histogram"]) > 0
    shares = [document[f"{part}_share"] for part in ("prefill", "draft", "verify", "host")]
    assert sum(shares) == pytest.approx(1)
    low, high = document["spread"]["speedup_end_to_end"]
    assert low <= document["speedup_end_to_end"] <= high


def test_batches_compare_with_batched_generate() -> None:
    target, drafter = pair()
    request = toys.inputs("llava", batch=3, ragged=True)
    found = compare(target, "coupled", drafter, Workload([request], 3), room=8, repeats=1)
    assert found.identical == 1
    assert "batch 1" in found.peers["assisted_as_shipped"]["skipped"]
    assert "batch 1" in found.peers["assisted"]["skipped"]
    assert found.environment["batch"] == 3


def test_a_recipe_without_a_drafter_still_meets_assisted_generation() -> None:
    target, drafter = pair("llama")
    found = compare(
        target, "prompt-lookup", drafter, Workload([toys.inputs("llama")]), room=8, repeats=1
    )
    assert found.drafter is None
    assert found.peers["assisted_as_shipped"]["speedup_end_to_end"] > 0


def test_assisted_generation_puts_the_configuration_back() -> None:
    target, drafter = pair("llama")
    before, kept = drafter.generation_config, deepcopy(drafter.generation_config.to_dict())
    answer = Assisted(target, drafter, 3, GREEDY).answer(toys.inputs("llama"), 8)
    assert drafter.generation_config is before
    assert before.to_dict() == kept
    assert answer.tokens == Generate(target, GREEDY).answer(toys.inputs("llama"), 8).tokens
    assert 1 <= answer.calls <= 8


def test_our_calls_and_theirs_are_counted_alike() -> None:
    target, _ = pair("llama")
    plain = Speculative(mmspec.accelerate(target, "plain"), GREEDY)
    for player in (plain, Generate(target, GREEDY)):
        assert player.answer(toys.inputs("llama"), 8).calls == 7


def test_who_may_fail_leaves_the_race() -> None:
    target, _ = pair("llama")
    good = Generate(target, GREEDY)
    bad = Generate(target, GREEDY, "bad", {"assistant_model": "nothing"})
    held = race([good, bad], [toys.inputs("llama")], 4, 2, may_fail=frozenset({"bad"}))
    assert list(held.laps) == ["generate"]
    assert "AttributeError" in held.failed["bad"]
    with pytest.raises(AttributeError):
        race([good, bad], [toys.inputs("llama")], 4, 2)


def test_tokens_end_with_the_end_token() -> None:
    target, _ = pair("llama")
    ids = Generate(target, GREEDY).answer(toys.inputs("llama"), 6).tokens[0]
    target.generation_config.eos_token_id = ids[2]
    sequences = toys.inputs("llama")["input_ids"].new_tensor([[9, *ids]])
    assert new_tokens(target, sequences, 1) == [ids[: ids.index(ids[2]) + 1]]


def test_ratios_are_medians_with_extremes() -> None:
    found = Ratio.of([2.0, 4.0, 9.0], [1.0, 1.0, 1.0])
    assert (found.median, found.spread) == (4.0, [2.0, 9.0])


def test_agreement_counts_places() -> None:
    mine, other = Answer([[1, 2, 3]], 2), Answer([[1, 5, 3, 4]], 3)
    assert agreement([mine], [mine]) == 1
    assert agreement([mine], [other]) == pytest.approx(2 / 4)


def test_statistics_of_requests_are_pooled() -> None:
    target, drafter = pair()
    fast = mmspec.accelerate(target, drafter=drafter)
    stats = [fast.generate(**toys.inputs("llava", s), max_new_tokens=9).stats for s in range(2)]
    assert sum(histogram(stats)) == sum(one.num_spec_steps for one in stats)
    calls = sum(one.target_calls for one in stats)
    assert tokens_per_target_call(stats) == pytest.approx(2 * 8 / calls)


def test_a_published_shape_is_measured_at_the_asked_acceptance() -> None:
    found = scale("tiny", contexts=(32,), rates=(0.0, 1.0), room=25, repeats=1, device="cpu")
    plain, never, always = found.points
    assert plain.tokens_per_target_call == never.tokens_per_target_call == 1
    assert always.tokens_per_target_call == pytest.approx(6)
    assert always.ideal_speedup > plain.ideal_speedup
    assert json.dumps(found.to_dict())


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"known shapes: llava-1\.5-7b"):
        scale("llava-2")


def test_growth_compares_contexts() -> None:
    found = growth((16, 64), room=12, repeats=1)
    assert [point.context for point in found.points] == [16, 64]
    assert all(point.host_seconds > 0 for point in found.points)
    assert found.ratio > 0
    assert "host_seconds" in found.to_dict()["points"][0]
