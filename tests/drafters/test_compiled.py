"""Drafts grown by one graph: the drafts of single forwards, and what is grown forward by forward.

The default tests run the same function as it is (`compile="none"`); those marked slow trace and
compile it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import mmspec
from mmspec.drafters import compiled
from mmspec.drafters.compiled import CompiledShape
from mmspec.drafters.oracle import Oracle
from mmspec.targets.graphs import EAGER
from tests import toys
from tests.partners import partner
from tests.targets.readers.test_compiled import _head_of, request_of

COUNTS = ("per_step_accepted", "per_step_drafted", "target_calls")


def pair_of(recipe: str, family: str = "llava", **parts: Any) -> tuple[Any, Any, Any]:
    """A model, and a recipe on it eager and compiled."""
    model = toys.model(family, layers=4)
    small = {"eagle-3": lambda: _head_of(model), "coupled": lambda: toys.model(family, layers=1)}
    drafter = small.get(recipe, lambda: partner(recipe, family, 4))()
    option = parts.pop("compile", EAGER)
    fast = [
        mmspec.accelerate(model, recipe, drafter=drafter, **more, **parts)
        for more in ({}, {"compile": option})
    ]
    return model, *fast


@pytest.mark.parametrize(
    ("recipe", "family", "batch", "seed", "parts"),
    [
        ("eagle-3", "llava", 1, 3, {"tree": [3, 2, 1]}),
        ("coupled", "qwen2_5_vl", 3, 4, {"length": 4}),
        ("coupled", "mistral-sliding", 1, None, {"length": 4}),
        pytest.param("eagle-3", "llava", 3, None, {}, marks=pytest.mark.exhaustive),
        pytest.param(
            *("coupled", "llava", 3, 5, {"length": 3, "verifier": "rejection"}),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_draft_of_one_graph_is_that_of_its_forwards(
    recipe: str, family: str, batch: int, seed: int | None, parts: dict[str, Any]
) -> None:
    _, eager, fast = pair_of(recipe, family, **parts)
    request = request_of(family, batch)
    how = {"max_new_tokens": 12, "do_sample": seed is not None, "seed": seed}
    for _ in range(2):
        expected, out = (one.generate(**request, **how) for one in (eager, fast))
    assert torch.equal(out.sequences, expected.sequences)
    for name in COUNTS:
        assert getattr(out.stats, name) == getattr(expected.stats, name)
    assert out.stats.compile["drafter"] == "compiled"
    depth = fast.session.bound.drafter.shape.max_depth
    assert fast.session.bound.compiled.runs["drafter"] < (out.stats.target_calls - 1) * depth


def test_a_graph_with_other_draws_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, eager, fast = pair_of("coupled", length=3)
    own = compiled.GraphModel.predict

    def shifted(self: Any, context: Any, state: Any, nodes: Any) -> Any:
        self.counts = self.counts + 2
        return own(self, context, state, nodes)

    monkeypatch.setattr(compiled.GraphModel, "predict", shifted)
    request = request_of("llava")
    expected, out = (one.generate(**request, max_new_tokens=12) for one in (eager, fast))
    assert torch.equal(out.sequences, expected.sequences)
    assert "scores differ" in out.stats.compile["drafter"]


def test_what_is_grown_forward_by_forward_says_why() -> None:
    model, _, fast = pair_of("coupled", length=3)
    request = request_of("llava")
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    how: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    out = fast.generate(**request, **how, logits_processor=processors)
    assert torch.equal(out.sequences, model.generate(**request, **how, logits_processor=processors))
    assert "logits are processed between" in out.stats.compile["drafter"]
    _, _, adaptive = pair_of("coupled", length="heuristic")
    assert not isinstance(adaptive.session.bound.drafter.shape, CompiledShape)
    stats = adaptive.generate(**request, **how).stats
    assert "changes its size" in stats.compile["drafter"]
    assert stats.not_compiled is not None
    assert stats.compile["drafter"].startswith("compiled, but ")


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["coupled", "eagle-3", "layer-skip", "dflash", "hydra-pp"])
def test_rows_of_an_engine_join_and_leave_compiled_drafts(recipe: str) -> None:
    model, _, fast = pair_of(recipe)
    requests = [
        {**request_of("llava", seed=seed), "max_new_tokens": 6 + 4 * (seed % 3), "do_sample": False}
        for seed in range(4)
    ]
    with mmspec.Engine(fast, max_rows=3) as engine:
        futures = [engine.submit(one) for one in requests]
        found = [future.result() for future in futures]
    for one, own in zip(requests, found, strict=True):
        assert torch.equal(own.sequences, model.generate(**one))
        assert own.stats.fallback is None
    assert fast.session.bound.compiled.runs["drafter"]


def test_a_drafter_by_hand_keeps_its_own_model() -> None:
    model, request = toys.model("llava"), request_of("llava")
    own: Any = Oracle([[5, 6, 7]], 0.2, 3)
    own.model = torch.nn.Identity()  # none of ours
    fast = mmspec.accelerate(model, "plain", drafter=own, compile=EAGER)
    out = fast.generate(**request, max_new_tokens=6)
    assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=6))
    assert out.stats.compile["target"] == "compiled"


def test_settings_of_sampling_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MAX_SETTINGS", 2)
    _, _, fast = pair_of("coupled", length=3)
    request = request_of("llava")
    for temperature in (0.5, 0.6, 0.5):
        out = fast.generate(
            **request, max_new_tokens=8, do_sample=True, temperature=temperature, seed=1
        )
        assert "settings" not in out.stats.compile["drafter"]
    out = fast.generate(**request, max_new_tokens=8, do_sample=True, temperature=0.7, seed=1)
    assert "more than 2 settings of sampling" in out.stats.compile["drafter"]


def test_another_head_is_not_read_by_the_graph_of_the_first() -> None:
    _, eager, fast = pair_of("coupled", length=3)
    request = request_of("llava")
    small = fast.session.bound.draft_model.model
    for _ in range(2):
        expected, out = (one.generate(**request, max_new_tokens=12) for one in (eager, fast))
        assert torch.equal(out.sequences, expected.sequences)
        assert out.stats.per_step_accepted == expected.stats.per_step_accepted
        head = small.get_output_embeddings()
        small.set_output_embeddings(torch.nn.Linear(head.in_features, head.out_features))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", True])
@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("eagle-3", {}),
        ("coupled", {"length": 4}),
        *((name, {}) for name in ("dflash", "hydra-pp", "layer-skip")),
    ],
)
def test_nothing_is_compiled_after_the_first_requests(
    recipe: str, parts: dict[str, Any], backend: str | bool
) -> None:
    """1 000 tokens and 50 requests of different lengths, drafts and targets compiled."""
    model, _, fast = pair_of(recipe, compile=backend, **parts)
    plain = mmspec.accelerate(model, "plain", compile=backend)
    tokens = differences = 0
    for index in range(54):
        request = request_of("llava", seed=index % 7)
        count = 10 + 3 * (index % 13)
        out, own = (one.generate(**request, max_new_tokens=count) for one in (fast, plain))
        assert torch.equal(out.sequences, own.sequences)
        eager = model.generate(**request, max_new_tokens=count)
        differences += not torch.equal(out.sequences, eager)
        if index >= 4:
            assert out.stats.compiled_graphs == 0
            tokens += out.stats.num_new_tokens
    assert out.stats.compile["target"] == out.stats.compile["prompt"] == "compiled"
    assert out.stats.compile["drafter"].startswith("compiled")
    assert tokens > 1000
    assert differences == 0


@pytest.mark.exhaustive
@torch.no_grad()
def test_a_graph_reads_no_value_from_the_device() -> None:
    """A length that depends on scores is found while it is traced, and refused."""
    _, _, fast = pair_of("coupled", length=3, compile="eager")
    shape = fast.session.bound.drafter.shape
    own: Any = shape.shape

    class Reading(type(own)):  # type: ignore[misc]
        def grow(self, model: Any, context: Any, *rest: Any) -> Any:
            if bool((context.position() > 1 << 20).any()):
                raise AssertionError
            return super().grow(model, context, *rest)

    object.__setattr__(shape, "shape", Reading(**vars(replace(own))))
    out = fast.generate(**request_of("llava"), max_new_tokens=8)
    assert "torch.compile failed" in out.stats.compile["drafter"]
    assert out.stats.fallback is None
