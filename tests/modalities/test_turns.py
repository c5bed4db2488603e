"""Conversations over several turns on one cache: as `generate()` goes on, so do we."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import mmspec
from mmspec.drafters.oracle import Oracle
from tests import toys

ROOM = 9
DECODERS = tuple(family for family in toys.FAMILIES if family != "whisper")
BATCHES: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"batch": 2},
    "ragged": {"batch": 3, "ragged": True},
}
GREEDY: dict[str, Any] = {"max_new_tokens": ROOM, "do_sample": False}
Request = dict[str, Any]


def next_turn(request: Request, said: Tensor, words: int = 6, seed: int = 5) -> Request:
    """The whole conversation so far and a question; pictures are in the cache already."""
    noise = torch.Generator().manual_seed(seed)
    asked = torch.randint(4, 140, (len(said), words), generator=noise)
    ids = torch.cat((said, asked), 1)
    more = torch.ones(len(ids), ids.shape[1] - request["input_ids"].shape[1], dtype=torch.int64)
    made = {"input_ids": ids}
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in request:
            filler = more if name == "attention_mask" else torch.zeros_like(more)
            made[name] = torch.cat((request[name], filler), 1)
    return made


def drafted(model: Any, request: Request, expected: Tensor) -> Any:
    """Our loop with a drafter that is often right."""
    rows = expected[:, request["input_ids"].shape[1] :].tolist()
    return mmspec.accelerate(model, "coupled", drafter=Oracle(rows, 0.5, tree=3, seed=1))


def two_turns(model: Any, request: Request, cache: Any = None) -> tuple[list[Request], list[Any]]:
    """What `generate()` says in two turns on one cache."""
    first = model.generate(**request, **GREEDY, return_dict_in_generate=True, past_key_values=cache)
    question, kept = next_turn(request, first.sequences), copy.deepcopy(first.past_key_values)
    second = model.generate(
        **question, **GREEDY, past_key_values=first.past_key_values, return_dict_in_generate=True
    )
    first.past_key_values = kept
    return [request, question], [first, second]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", DECODERS)
def test_a_second_turn_goes_on_as_generate_does(family: str, batch: str) -> None:
    model, request = toys.model(family), toys.inputs(family, **BATCHES[batch])
    requests, expected = two_turns(model, request)
    cache = None
    for asked, said in zip(requests, expected, strict=True):
        fast = drafted(model, asked, said.sequences)
        out = fast.generate(**asked, **GREEDY, past_key_values=cache, return_dict_in_generate=True)
        assert torch.equal(out.sequences, said.sequences)
        assert out.stats.fallback is None
        assert out.stats.target_calls < ROOM
        cache = out.past_key_values
        assert_same_cache(cache, said.past_key_values)


def assert_same_cache(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert type(mine) is type(other)
        states = vars(other)
        names = ("keys", "values") if "keys" in states else ("conv_states", "recurrent_states")
        for name in names:
            pair = (vars(mine)[name], states[name])
            pairs = (
                [pair]
                if name in ("keys", "values")
                else [
                    (pair[0][place], state) for place, state in pair[1].items() if state is not None
                ]
            )
            for a, b in pairs:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "lfm2", "llava", "qwen2_5_vl"])
def test_turns_change_hands(family: str, batch: str) -> None:
    """Ours, `generate()`, ours inside `generate()`, a stream: on one cache, the user's own."""
    model, request = toys.model(family), toys.inputs(family, **BATCHES[batch])
    (_, question), (first, second) = two_turns(model, request, DynamicCache(config=model.config))
    third = next_turn(question, second.sequences, seed=6)
    expected = model.generate(**third, **GREEDY, past_key_values=second.past_key_values)
    cache = DynamicCache(config=model.config)
    fast = mmspec.accelerate(model, "prompt-lookup")
    out = fast.generate(**request, **GREEDY, past_key_values=cache)
    assert out.past_key_values is cache
    assert torch.equal(out.sequences, first.sequences)
    assert torch.equal(
        model.generate(**question, **GREEDY, past_key_values=cache), second.sequences
    )
    tokens = model.generate(**third, **GREEDY, past_key_values=cache, custom_generate=fast)
    assert torch.equal(tokens, expected)
    assert cache.get_seq_length() == tokens.shape[1] - 1
    fourth = next_turn(third, tokens, seed=7)
    stream = fast.stream(**fourth, **GREEDY, past_key_values=cache)
    rows: list[list[int]] = [[] for _ in tokens]
    for kept in stream:
        for row, new in zip(rows, kept.tokens, strict=True):
            row.extend(new)
    plain = mmspec.decode_plain(model, **request_anew(request, fourth), **GREEDY).sequences
    assert rows == plain[:, fourth["input_ids"].shape[1] :].tolist()
    assert cache.get_seq_length() == plain.shape[1] - 1


def request_anew(request: Request, last: Request) -> Request:
    """The last turn without a cache: its pictures come with it again."""
    return {**request, **last}
