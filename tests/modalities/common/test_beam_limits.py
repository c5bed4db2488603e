"""More beams than a vocabulary or memory has are refused with one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec._hf_beams import BeamSearch
from tests import toys


def generate(beams: int) -> Any:
    fast = mmspec.accelerate(toys.model("llama"), "plain")
    return fast.generate(**toys.inputs("llama"), max_new_tokens=3, num_beams=beams)


def test_beams_beyond_the_vocabulary_are_refused() -> None:
    size = toys.model("llama").config.vocab_size
    for beams in (10**6, size + 1):
        with pytest.raises(ValueError, match=f"^num_beams={beams} .* give at most {size}$"):
            generate(beams)
    assert generate(4).sequences.shape[1] > 3


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("full")])
@pytest.mark.parametrize("name", ["__init__", "advance"])
def test_beams_beyond_memory_are_refused(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(BeamSearch, name, fail)
    with pytest.raises(ValueError, match=r"num_beams=3: memory is too small .* give fewer beams"):
        generate(3)
