"""Positions that GLM-Image keeps of its prompt: tokens of its grids are those of `generate()`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec._hf_positions import grid_positions
from mmspec.drafters.oracle import Oracle
from mmspec.modalities.common import families
from mmspec.targets.readers import check
from tests.toys import glm_image

REQUESTS = {
    "alone": ([[100, 101, 102, 103]], 4, 6),
    "tall": ([[110, 107, 105, 111, 120]], 6, 4),
    "ragged": ([[100, 101, 102, 103], [110, 107], [100, 101, 103, 104, 105]], 4, 6),
}
NEW = 4 * 6 + 2 * 3 + 1
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
pytestmark = pytest.mark.exhaustive


@lru_cache(maxsize=1)
def model() -> Any:
    return glm_image.token_model()


def own(name: str) -> Tensor:
    tokens: Tensor = model().generate(**request(name), **GREEDY)
    return tokens


def request(name: str) -> dict[str, Tensor]:
    return glm_image.request(*REQUESTS[name])


def test_positions_are_those_of_the_small_grid_the_large_one_and_the_end() -> None:
    given = request("alone")
    model()(**given)
    found = grid_positions(model(), given)
    assert found is not None
    assert found.shape == (3, 1, NEW)
    first = given["input_ids"].shape[1]
    assert found[:, 0, :6].sub(first).tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2] * 2]
    assert found[:, 0, 6].tolist() == [first + 3] * 3
    assert found[:, 0, -1].tolist() == [first + 3 + 6] * 3


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("recipe", ["plain", "prompt-lookup", "token-recycling"])
def test_tokens_are_those_of_generate(recipe: str, name: str) -> None:
    fast = mmspec.accelerate(model(), recipe)
    assert torch.equal(fast.generate(**request(name), **GREEDY).sequences, own(name))


@pytest.mark.parametrize("corruption", [0.0, 0.4])
def test_rows_keep_different_numbers_of_tokens(corruption: float) -> None:
    given, tokens = request("ragged"), own("ragged")
    answers = tokens[:, given["input_ids"].shape[1] :].tolist()
    fast = mmspec.accelerate(model(), "prompt-lookup", drafter=Oracle(answers, corruption))
    out = fast.generate(**given, **GREEDY)
    assert torch.equal(out.sequences, tokens)
    assert out.stats.target_calls < NEW - 10


def test_sampled_tokens_do_not_depend_on_the_recipe() -> None:
    settings: dict[str, Any] = {**GREEDY, "do_sample": True, "top_k": 0, "seed": 3}
    plain = mmspec.decode_plain(model(), **request("ragged"), **settings).sequences
    fast = mmspec.accelerate(model(), "token-recycling")
    assert torch.equal(fast.generate(**request("ragged"), **settings).sequences, plain)
    assert not torch.equal(plain, own("ragged"))


def test_requests_at_once_keep_their_own_positions() -> None:
    """The model itself keeps those of the last prompt alone."""
    streams = {
        name: mmspec.accelerate(model(), "prompt-lookup").stream(**request(name), **GREEDY)
        for name in REQUESTS
    }
    done: dict[str, Tensor] = {}
    while len(done) < len(streams):
        for name in streams.keys() - done.keys():
            try:
                next(streams[name])
            except StopIteration as end:
                done[name] = end.value.sequences
    assert all(torch.equal(tokens, own(name)) for name, tokens in done.items())


def test_requests_that_join_a_batch_keep_their_own_positions() -> None:
    fast = mmspec.accelerate(model(), "prompt-lookup")
    names = ("alone", "tall", "alone")
    wanted = [own(name) for name in names]
    with mmspec.Engine(fast, max_rows=2) as engine:
        futures = [engine.submit({**request(name), **GREEDY}) for name in names]
        found = [future.result(60).sequences for future in futures]
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_a_picture_in_the_prompt_is_read() -> None:
    ids = torch.tensor([[100, glm_image.BOI, *[glm_image.IMAGE] * 16, glm_image.EOI, 104, 64]])
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6]]),
        "images_per_sample": torch.tensor([2]),
        "pixel_values": torch.randn(16, 3 * 16 * 16, generator=torch.Generator().manual_seed(0)),
    }
    wanted = model().generate(**given, max_new_tokens=25, do_sample=False)
    fast = mmspec.accelerate(model(), "token-recycling")
    out = fast.generate(**given, max_new_tokens=25, do_sample=False)
    assert torch.equal(out.sequences, wanted)


def test_positions_that_count_on_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the table, rows read together are other rows."""
    monkeypatch.setattr(families, "FAMILIES", {})
    check.clear_cache()
    with pytest.raises(ValueError, match="scores a chain of drafted tokens otherwise"):
        mmspec.accelerate(model(), "prompt-lookup").generate(**request("ragged"), **GREEDY)
    check.clear_cache()
