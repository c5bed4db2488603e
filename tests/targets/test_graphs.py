"""Compiled functions: backends, guards, changes of modules, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspec.stats import DRAFTER, TARGET, CompileLog
from mmspec.targets.graphs import EAGER, GraphSet, ModuleFingerprint, keep_argument_guards, trace
from mmspec.targets.graphs import parse_backend as parse


def test_backends_are_named() -> None:
    assert parse(True) == "inductor"
    wrong: Any
    for wrong in ("fastest", 3, 1):
        with pytest.raises(ValueError, match=r"compile=.* must be True, False or a backend"):
            parse(wrong)
    with pytest.raises(ValueError, match="compile='cudagraphs' fails at a second size"):
        parse("cudagraphs")


def test_a_trace_keeps_sizes_that_differ_between_calls() -> None:
    """Also through `linear`, which C++ takes apart."""
    layer, x = nn.Linear(6, 4, bias=False), torch.ones(1, 5, 6)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        traced = trace(lambda one: [layer(one)], [x])
        assert traced(torch.ones(1, 7, 6))[0].shape == (1, 7, 4)


def _double(x: Tensor) -> list[Tensor]:
    return [2 * x]


def _run(graphs: GraphSet, x: Tensor, gap: float | None = None) -> Any:
    return graphs.run("key", lambda: _double, (x,), lambda: [(x, 0)], lambda out: gap)


@pytest.mark.parametrize("backend", [EAGER, "eager"])
def test_one_graph_serves_all_lengths(backend: str) -> None:
    log = CompileLog()
    graphs = GraphSet("A", log, backend, TARGET)
    for length in (3, 5, 8):
        assert _run(graphs, torch.ones(length))[0].tolist() == [2.0] * length
    assert log.graphs == (backend != EAGER)
    assert log.forwards == log.runs[TARGET] == 3


def test_what_differs_is_refused_and_said_once() -> None:
    log = CompileLog()
    graphs = GraphSet("A", log, EAGER, DRAFTER)
    assert _run(graphs, torch.ones(2), gap=0.5) is None
    assert graphs.is_refused
    assert "scores differ" in log.describe(DRAFTER)
    assert log.describe(TARGET) == "eager: it ran no forward of its own"
    log.start()
    assert list(log.reasons[DRAFTER]) == [
        "A runs eager: its scores differ when compiled (by 0.5 of their spread)"
    ]


def test_guards_of_modules_are_left_to_the_fingerprint() -> None:
    def guard(kind: str, source: str, is_global: bool = False) -> Any:
        return SimpleNamespace(
            guard_type=kind,
            is_global=is_global,
            orig_guard=SimpleNamespace(source=SimpleNamespace(name=source)),
        )

    kept = [guard("TENSOR_MATCH", "LOCAL"), guard("SHAPE_ENV", "SHAPE_ENV")]
    kept.append(guard("GRAD_MODE", "GLOBAL", is_global=False))
    left = [guard("TYPE_MATCH", "LOCAL_UNSPECIALIZED_NN_MODULE"), guard("ID_MATCH", "GLOBAL", True)]
    assert keep_argument_guards([*kept, *left]) == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.train(),
        lambda model: model.double(),
        lambda model: model.append(nn.ReLU()),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda model: model.__setitem__(0, nn.Linear(2, 2)),
        lambda model: model[0].scaling.update(a=3.0),  # of an adapter, as peft has it
        lambda model: model[0].active.append("b"),
        lambda model: setattr(model[0], "forward", model[0].forward),
    ],
)
def test_a_changed_module_has_another_fingerprint(change: Any) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2)).eval()
    model[0].scaling, model[0].active, model[0].table = {"a": 2.0}, ["a"], torch.ones(2)
    graphs = GraphSet("A", CompileLog(), EAGER, TARGET)
    graphs.follow(ModuleFingerprint([model]))
    graphs.graphs["key"] = _double
    with torch.no_grad():
        model[0].weight.fill_(3.0)  # weights are read in place
    model[0].table = torch.zeros(2)
    graphs.follow(ModuleFingerprint([model]))
    assert graphs.graphs
    assert ModuleFingerprint([model]) == ModuleFingerprint([model])
    change(model)
    graphs.follow(ModuleFingerprint([model]))
    assert not graphs.graphs
