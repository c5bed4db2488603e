"""What `mmspec bench --compile` measures: every recipe eager and compiled, beside `generate()`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmspec
from mmspec.cli.bench import _with_compiled
from mmspec.modalities.common.measures import (
    COMPILED_GENERATE,
    CompiledGenerate,
    Generate,
    is_compiled,
    request_workload,
)
from mmspec.targets.graphs import EAGER
from tests import toys


def loaded(model: Any) -> Any:
    owner = SimpleNamespace(plain=("plain", {}))
    return SimpleNamespace(
        selection=SimpleNamespace(owner=owner),
        accelerate=lambda name, compile: mmspec.accelerate(
            model, name, compile=EAGER if compile else False
        ),
    )


def test_every_recipe_runs_again_compiled_and_its_peer_beside_it() -> None:
    model, request = toys.model("llama"), {**toys.inputs("llama"), "max_new_tokens": 4}
    eager = {"prompt-lookup": mmspec.accelerate(model, "prompt-lookup")}
    left_out: dict[str, str] = {}
    again = _with_compiled(loaded(model), eager, left_out)
    assert list(again) == ["plain, compiled", "prompt-lookup, compiled"]
    assert not left_out
    work = request_workload(model, [request])
    assert work.peers is not None
    for models, is_measured in ((eager, False), ({**eager, **again}, True)):
        runners = {name: work.fast(one) for name, one in models.items()}
        found, _ = work.peers(runners, 0, lambda *_: None)
        assert (COMPILED_GENERATE in found) == is_measured
        assert any(map(is_compiled, runners.values())) == is_measured


def test_recipes_that_do_not_compile_are_left_out_with_the_reason() -> None:
    left_out: dict[str, str] = {}
    assert not _with_compiled(loaded(toys.model("whisper")), {}, left_out)
    assert "no forward of modality asr is compiled" in left_out["plain, compiled"]


@pytest.mark.slow
def test_compiled_generate_returns_the_tokens_of_generate() -> None:
    model, request = toys.model("llama"), {**toys.inputs("llama"), "max_new_tokens": 6}
    ours, own = (one.run(request, 0) for one in (CompiledGenerate(model), Generate(model)))
    assert ours.values == own.values
    assert (ours.count, ours.calls) == (own.count, own.calls)
    torch.compiler.reset()
