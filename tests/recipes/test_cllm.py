"""Recipe cllm is Jacobi iteration: exact to the target that is given."""

from __future__ import annotations

import pytest
import torch

import mmspec
from tests import toys


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "llava"])
def test_output_is_plain_decodings(family: str) -> None:
    """Greedy, ragged rows; sampled, with the noise of each position; streamed."""
    model, request = toys.model(family), toys.inputs(family, batch=2, ragged=True)
    fast = mmspec.accelerate(model, "cllm", length=5)
    out = fast.generate(**request, max_new_tokens=8)
    assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=8))
    assert out.stats.exact
    given = {"max_new_tokens": 8, "do_sample": True, "seed": 2}
    sampled = fast.generate(**request, **given).sequences
    assert torch.equal(sampled, mmspec.decode_plain(model, **request, **given).sequences)
    rounds = [*fast.stream(**request, max_new_tokens=8)]
    assert sum(len(one.tokens[0]) for one in rounds) == 8
