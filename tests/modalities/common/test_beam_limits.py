"""More beams than the vocabulary are searched; more than memory has are one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec._hf_beams import BeamSearch
from tests import toys
from tests.partners import noisy


def generate(beams: int) -> Any:
    fast = mmspec.accelerate(toys.model("llama"), "plain")
    return fast.generate(**toys.inputs("llama"), max_new_tokens=3, num_beams=beams)


@pytest.mark.parametrize("recipe", ["plain", "coupled"])
def test_beams_beyond_the_vocabulary_are_those_of_generate(recipe: str) -> None:
    """The first step has fewer continuations than beams; the second one fills the others."""
    model, drafter = toys.model("llama"), noisy("llama")
    beams = model.config.vocab_size + 3
    request = {
        **toys.inputs("llama"),
        **{"max_new_tokens": 3, "num_beams": beams, "num_return_sequences": beams},
    }
    wanted = model.generate(**request, do_sample=False)
    fast = mmspec.accelerate(model, recipe, **({} if recipe == "plain" else {"drafter": drafter}))
    assert torch.equal(fast.generate(**request).sequences, wanted)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("full"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
@pytest.mark.parametrize("name", ["__init__", "advance"])
def test_beams_beyond_memory_are_refused(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(BeamSearch, name, fail)
    with pytest.raises(ValueError, match=r"num_beams=3: memory is too small .* give fewer beams"):
        generate(3)


def test_other_errors_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(BeamSearch, "advance", fail)
    with pytest.raises(RuntimeError, match=r"^broken$"):
        generate(3)
