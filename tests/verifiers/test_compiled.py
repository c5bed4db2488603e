"""Verification by one graph: the verdicts of the verifier as it is, for tokens of any verifier."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec.targets.graphs import EAGER
from mmspec.verifiers.compiled import CompiledVerifier
from tests import toys
from tests.covering import limited
from tests.targets.readers.test_compiled import request_of


@pytest.mark.parametrize(
    ("recipe", "batch", "parts"),
    limited(
        [
            ("coupled", 3, {"length": 3}),
            ("coupled", 1, {"tree": "dynamic"}),
            ("coupled", 1, {"length": 3, "verifier": "rejection"}),
            ("coupled", 1, {"length": 3, "verifier": "block"}),
        ],
        2,
    ),
)
def test_a_graph_gives_the_verdicts_of_its_verifier(
    recipe: str, batch: int, parts: dict[str, Any]
) -> None:
    model, small = toys.model("llava"), toys.model("llava", layers=1)
    request, how = request_of("llava", batch), {"max_new_tokens": 10, "do_sample": True, "seed": 5}
    eager = mmspec.accelerate(model, recipe, drafter=small, **parts)
    fast = mmspec.accelerate(model, recipe, drafter=small, compile=EAGER, **parts)
    for _ in range(2):
        expected, out = (one.generate(**request, **how) for one in (eager, fast))
        assert torch.equal(out.sequences, expected.sequences)
        assert out.stats.per_step_accepted == expected.stats.per_step_accepted
    assert out.stats.compile["verifier"] == "compiled"
    assert out.stats.compiled_forwards is not None
    assert isinstance(fast.session.bound.verifier, CompiledVerifier)
    assert fast.session.bound.verifier.lossless == eager.session.bound.verifier.lossless


def test_other_shapes_run_eager() -> None:
    """A graph per number of rows: the lengths of lookups differ."""
    model, request = toys.model("llama"), request_of("llama")
    fast = mmspec.accelerate(model, "prompt-lookup", compile=EAGER)
    out = fast.generate(**request, max_new_tokens=24)
    assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=24))
    assert len(fast.session.bound.verifier.graphs.graphs) <= 1


def test_a_graph_with_other_verdicts_is_refused() -> None:
    model, small = toys.model("llava"), toys.model("llava", layers=1)
    fast = mmspec.accelerate(model, "coupled", drafter=small, compile=EAGER, length=3)
    own: Any = fast.session.bound.verifier
    make = type(own)._make_function

    class Wrong(CompiledVerifier):
        def _make_function(self, *given: Any) -> Any:
            function = make(self, *given)
            return lambda *inputs: [one + 1 for one in function(*inputs)]

    fast.session.bound.verifier = Wrong(own.verifier, own.graphs)
    request = request_of("llava")
    out = fast.generate(**request, max_new_tokens=8)
    assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=8))
    assert "differ when compiled" in out.stats.compile["verifier"]
