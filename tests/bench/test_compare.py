"""The benchmark of models that write: what it promises, and peers that leave nothing behind."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import fields, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmspec
from mmspec.bench import Comparison, Row, compare, growth, scale
from mmspec.bench.forwards import Replay
from mmspec.bench.reporting import silent
from mmspec.bench.row import (
    Measurements,
    _mean,
    acceptance_histogram,
    make_row,
    over_accepted_mass,
    tokens_per_target_call,
)
from mmspec.bench.studies.scale import count_forward_bytes, measure_bandwidth
from mmspec.bench.studies.shapes import build_model
from mmspec.bench.timing import time_runners
from mmspec.bench.workload import agreement, fact_accuracy, repeat_prompts
from mmspec.modalities.common.measures import (
    AssistedGenerate,
    Generate,
    SpeculativeGenerate,
    extract_new_tokens,
    request_workload,
    stock_baselines,
)
from mmspec.modality import RunResult, Workload
from mmspec.trees import Tree
from tests import toys
from tests.drafters.state_heads import head_of


def pair(family: str = "llava") -> tuple[Any, Any]:
    return toys.model(family), toys.model(family, seed=1)


def asked(family: str, *args: Any, room: int = 8, **more: Any) -> dict[str, Any]:
    return {**toys.inputs(family, *args, **more), "do_sample": False, "max_new_tokens": room}


def compared(family: str, recipe: str, *requests: Any, batch: int = 1, **more: Any) -> Comparison:
    target, drafter = pair(family)
    small = drafter if mmspec.recipes.get(recipe).takes_drafter else None
    work = request_workload(target, requests or [asked(family)], None, batch, drafter)
    fast = mmspec.accelerate(target, recipe, drafter=small)
    return compare("toy", {recipe: fast}, work, **{"repeats": 1, **more})


@pytest.mark.exhaustive
def test_a_comparison_measures_everything() -> None:
    requests = [asked("llava", seed) for seed in range(2)]
    found = compared("llava", "coupled", *requests, repeats=2, drafters={"coupled": "small"})
    document = json.loads(json.dumps(found.to_dict()))
    assert [one["recipe"] for one in document["rows"]] == ["plain", "coupled"]
    plain, mine = found.rows
    assert (mine.exact, mine.identical, mine.drafter) == (True, 1, "small")
    assert (plain.calls, plain.fewer_calls, plain.tokens_per_target_call) == (7, 1, 1)
    assert plain.fewer_calls_error == 0
    assert mine.calls is not None
    assert mine.fewer_calls == pytest.approx(7 / mine.calls)
    assert mine.qualities["agreement with generate"]["value"] == 1
    own = found.row("generate")
    assert (own.speedup_end_to_end, own.speedup_decode, own.calls) == (1, 1, 7)
    for name in ("assisted_as_shipped", "assisted", "prompt_lookup"):
        assert found.row(name).identical == 1
        assert (found.row(name).fewer_calls or 0) >= 1
    assert sum(mine.acceptance_histogram) > 0
    shares = [getattr(mine, f"{part}_share") for part in ("prefill", "draft", "verify", "host")]
    assert sum(shares) == pytest.approx(1)
    assert set(mine.spread) == {"speedup_over_plain", "speedup_end_to_end", "speedup_decode"}
    for name, (least, most) in mine.spread.items():
        assert least <= getattr(mine, name) <= most
    assert 0.1 < (mine.engine_efficiency or 0) < 1.2
    assert plain.ideal_speedup == 1
    assert (mine.distance, mine.fallback, mine.unverified_share) == (None, None, 0)
    assert (found.modality, found.settings["max_new_tokens"]) == ("vlm", 8)


def test_several_recipes_and_a_control_are_timed_together() -> None:
    target, drafter = pair("llama")
    ways = {
        name: mmspec.accelerate(target, name, drafter=small)
        for name, small in (("coupled", drafter), ("prompt-lookup", None))
    }
    work = request_workload(target, [asked("llama")], None)
    found = compare("toy", ways, work, repeats=1, peers=False, efficiency=False, controls=True)
    assert [one.recipe for one in found.rows] == ["plain", *ways]
    (control,) = found.controls
    assert control.identical == 1  # a control is exact, too
    assert control.qualities == {}
    assert control.mean_acceptance_length is not None
    assert [one.recipe for one in found.baselines] == ["generate"]
    with pytest.raises(ValueError, match="two runners are called generate"):
        compare("toy", {"generate": ways["coupled"]}, work)
    with pytest.raises(ValueError, match="drop controls"):
        compare("toy", ways, replace(work, controls=None), controls=True)


@pytest.mark.exhaustive
def test_compiled_rows_have_no_efficiency() -> None:
    """Their forwards run eager while they are recorded, so a share of them is not one of graphs."""
    target = toys.model("llama")
    ways = {
        "eager": mmspec.accelerate(target, "prompt-lookup"),
        "compiled": mmspec.accelerate(target, "prompt-lookup", compile="none"),
    }
    found = compare("big", ways, request_workload(target, [asked("llama")], None), repeats=1)
    assert found.row("eager").engine_efficiency is not None
    assert found.row("compiled").engine_efficiency is None
    assert found.row("compiled").identical == 1


def test_batches_compare_with_batched_generate() -> None:
    request = asked("llava", batch=3, ragged=True)
    found = compared("llava", "coupled", request, batch=3, efficiency=False)
    assert found.row("coupled").identical == 1
    for name in ("assisted_as_shipped", "assisted"):
        assert "batch 1" in str(found.row(name).skipped)
    assert found.environment["batch"] == found.batch == 3


@pytest.mark.exhaustive
def test_a_recipe_without_a_drafter_still_meets_assisted_generation() -> None:
    found = compared("llama", "prompt-lookup", efficiency=False)
    assert (found.row("assisted_as_shipped").speedup_end_to_end or 0) > 0
    target = toys.model("llama")
    work = request_workload(target, [asked("llama")])
    ways = {"prompt-lookup": mmspec.accelerate(target, "prompt-lookup")}
    found = compare("toy", ways, work, repeats=1, efficiency=False)
    assert found.row("assisted").skipped == "no draft model was given"


def test_a_head_is_no_assistant_of_transformers() -> None:
    target = toys.model("llama")
    found, why = stock_baselines(target, head_of("llama"), [asked("llama")], 1, 0, silent)
    assert [*found] == ["prompt_lookup"]
    assert {*why} == {"assisted_as_shipped", "assisted"}
    assert all("the draft model is a head" in one for one in why.values())


def test_assisted_generation_puts_the_configuration_back() -> None:
    target, drafter = pair("llama")
    before, kept = drafter.generation_config, deepcopy(drafter.generation_config.to_dict())
    run = AssistedGenerate(target, drafter, 3).run(asked("llama"), 0)
    assert drafter.generation_config is before
    assert before.to_dict() == kept
    assert run.values == Generate(target).run(asked("llama"), 0).values
    assert 1 <= run.calls <= 8


def test_our_calls_and_theirs_are_counted_alike() -> None:
    target, _ = pair("llama")
    for one in (SpeculativeGenerate(mmspec.accelerate(target, "plain")), Generate(target)):
        assert one.run(asked("llama"), 0).calls == 7
        assert one.run_first_token(asked("llama"), 0).values == [
            one.run(asked("llama"), 0).values[0][:1]
        ]


def test_a_peer_that_cannot_run_is_dropped() -> None:
    target, _ = pair("llama")
    runners = {"generate": Generate(target), "bad": Generate(target, {"assistant_model": "none"})}
    timed = time_runners(runners, [asked("llama")], 2, may_fail={"bad"})
    assert list(timed.timings) == ["generate"]
    assert "AttributeError" in timed.failures["bad"]
    with pytest.raises(AttributeError):
        time_runners(runners, [asked("llama")], 2)


def test_a_recipe_that_cannot_run_is_dropped_where_there_are_others() -> None:
    class Broken(Fixed):
        def run(self, request: Any, seed: int) -> RunResult:
            raise ValueError("it has no sound")

    runners: dict[str, Any] = {"good": Fixed(1), "bad": Broken()}
    work = Workload([{}], Fixed(2), lambda fast: runners[fast.name])
    named = {
        name: SimpleNamespace(name=name, modality=SimpleNamespace(name="x")) for name in runners
    }
    found = compare("toy", named, work, repeats=1)  # type: ignore[arg-type]
    assert [one.recipe for one in found.rows] == ["plain", "good"]
    assert found.row("bad").skipped == "ValueError: it has no sound"
    with pytest.raises(ValueError, match="it has no sound"):
        compare("toy", {"bad": named["bad"]}, work, repeats=1)  # type: ignore[dict-item]


def test_tokens_end_with_the_end_token() -> None:
    target, _ = pair("llama")
    ids = Generate(target).run(asked("llama", room=6), 0).values[0]
    target.generation_config.eos_token_id = ids[2]
    sequences = toys.inputs("llama")["input_ids"].new_tensor([[9, *ids]])
    assert extract_new_tokens(target, sequences, 1) == [ids[: ids.index(ids[2]) + 1]]


def test_agreement_counts_places() -> None:
    mine, other = RunResult([[1, 2, 3]], 3, 2), RunResult([[1, 5, 3, 4]], 4, 3)
    judge = agreement("generate").judge
    assert judge([mine], {"generate": [mine]}) == [(1, 3)]
    assert judge([mine], {"generate": [other]}) == [(2 / 4, 4)]
    assert judge([mine], {}) == []


class Fixed:
    """Answers with the calls it was given."""

    def __init__(self, *calls: int) -> None:
        self.calls = calls

    def run(self, request: Any, seed: int) -> RunResult:
        return RunResult([[seed]], 1, self.calls[seed])

    def run_first_token(self, request: Any, seed: int) -> None:
        return None


def test_ratios_of_calls_have_an_error_over_requests() -> None:
    runners = {
        "plain": Fixed(10, 10, 10, 10),
        "same": Fixed(5, 5, 5, 5),
        "other": Fixed(4, 6, 4, 6),
    }
    requests: list[dict[str, Any]] = [{}] * 4
    quality = fact_accuracy(lambda answers: [(one.values[0][0] % 2, 1) for one in answers])
    work = Workload(requests, runners["plain"], lambda fast: fast, qualities=(quality,))
    timings = time_runners(runners, requests, 1).timings
    shown = {name: one.results for name, one in timings.items()}
    found = Measurements(work, timings, shown, "plain", None)
    same, other = make_row("same", found), make_row("other", found)
    assert (same.fewer_calls, same.fewer_calls_error) == (2, 0)
    assert other.fewer_calls == 2
    left = torch.tensor([2.0, -2.0, 2.0, -2.0])  # plain's less twice these
    assert other.fewer_calls_error == pytest.approx(float(left.std()) / 2 / 5)
    assert other.qualities["facts right"] == {
        **{"value": 0.5, "error": pytest.approx(3**0.5 / 6)},
        **{"gap": 0, "gap_error": 0},
    }
    assert (same.speedup_end_to_end, same.mean_acceptance_length) == (None, None)


def test_shares_are_of_all_facts() -> None:
    judge = fact_accuracy(lambda answers: [(1, 1), (1, 3)]).judge
    assert judge([], {}) == [(1, 1), (pytest.approx(1 / 3), 3)]
    shares = [(1.0, 1.0), (1 / 3, 3.0)]
    value, uncertain = _mean(shares)
    assert value == pytest.approx(2 / 4)
    assert uncertain == pytest.approx(1 / 4)  # right less share x asked: 1/4, -1/4


def test_a_row_always_has_the_same_keys() -> None:
    assert set(Row("one").to_dict()) == {one.name for one in fields(Row)}
    assert Row("one", skipped="no model").to_dict()["skipped"] == "no model"


def test_prompts_fill_whole_batches() -> None:
    assert repeat_prompts(["a", "b", "c"], 2) == [["a", "b"], ["c", "a"]]
    assert repeat_prompts(["a"], 3) == [["a", "a", "a"]]


def test_statistics_of_requests_are_pooled() -> None:
    target, drafter = pair()
    fast = mmspec.accelerate(target, drafter=drafter)
    stats = [fast.generate(**toys.inputs("llava", s), max_new_tokens=9).stats for s in range(2)]
    assert sum(acceptance_histogram(stats)) == sum(one.num_spec_steps for one in stats)
    calls = sum(one.target_calls for one in stats)
    assert tokens_per_target_call(stats) == pytest.approx(2 * 8 / calls)
    lossy = [
        replace(stats[0], over_accepted_mass=mass, num_new_tokens=count)
        for mass, count in ((0.5, 1), (0.1, 3), (None, 9))
    ]
    assert over_accepted_mass(lossy) == pytest.approx(0.2)  # per token of those that were measured
    assert over_accepted_mass(stats) is None


def test_a_published_shape_is_measured_at_a_given_acceptance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock on which every forward takes a second, and what is around it another one."""

    def counted(runners: Any, inputs: Any, repeats: int, *_: Any) -> Any:
        calls = runners[0].run(inputs).stats.target_calls
        return [[(2.0 * calls, Replay(0.0, float(calls)))] * repeats]

    monkeypatch.setattr(import_module("mmspec.bench.studies.scale"), "run_and_replay", counted)
    found = scale(
        "tiny", contexts=(32,), rates=(0.0, 1.0), max_new_tokens=25, repeats=1, device="cpu"
    )
    plain, never, always = found.points
    assert plain.tokens_per_target_call == never.tokens_per_target_call == 1
    assert always.tokens_per_target_call == pytest.approx(6)
    assert plain.ideal_speedup == never.ideal_speedup == 1
    assert always.ideal_speedup == pytest.approx(6)
    assert {one.engine_efficiency for one in found.points} == {0.5}
    assert json.dumps(found.to_dict())


def test_a_shape_is_measured_compiled_and_with_trees_beside_the_limit_of_memory() -> None:
    found = scale(
        "tiny",
        contexts=(16,),
        rates=(1.0,),
        max_new_tokens=8,
        repeats=1,
        tree=Tree.branching([2, 1]),
        compile="none",
        device="cpu",
    )
    rows = [(one.mode, one.draft, one.acceptance) for one in found.points]
    expected = [(None, None), ("chain", 1.0), ("tree", 1.0)]
    assert rows == [(mode, *one) for mode in ("eager", "compiled") for one in expected]
    for eager, compiled in zip(found.points[:3], found.points[3:], strict=True):
        assert eager.tokens_per_target_call == compiled.tokens_per_target_call
        assert eager.engine_efficiency is not None
        assert compiled.engine_efficiency is compiled.host_milliseconds_per_round is None
        assert eager.memory_milliseconds_per_call == compiled.memory_milliseconds_per_call
    model = build_model("tiny", torch.device("cpu"), torch.float32)
    weights = sum(one.numel() for one in model.parameters())
    read = 4 * (weights - model.get_input_embeddings().weight.numel())
    assert count_forward_bytes(model, 2, 10) == read + 4 * 2 * 10 * 2 * 4 * 128
    limit = read / measure_bandwidth(torch.device("cpu"))
    assert 0 < limit < 1


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"known shapes: llava-1\.5-7b"):
        scale("llava-2")


def test_growth_drops_its_first_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter([9.0, 1.0, 1.0])

    def turns(cases: Any, room: int) -> Any:
        host = next(hosts)
        return [[(host + 2.0, 2.0)] for _ in cases]

    monkeypatch.setattr(import_module("mmspec.bench.studies.growth"), "_turns", turns)
    found = growth((16, 32), max_new_tokens=4, repeats=2)
    assert [(point.rounds, point.host_seconds) for point in found.points] == [(2, 1.0)] * 2


def test_growth_compares_contexts() -> None:
    found = growth((16, 64), max_new_tokens=12, repeats=1)
    assert [point.context for point in found.points] == [16, 64]
    assert all(point.host_seconds > 0 for point in found.points)
    assert found.ratio > 0
    assert "host_seconds" in found.to_dict()["points"][0]
