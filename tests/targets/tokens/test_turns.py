"""Conversations over several turns with one cache: equal to `generate()`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import generic

import mmspec
from mmspec import _hf_cache
from mmspec.drafters.oracle import Oracle
from mmspec.modalities.vlm import survey
from mmspec.modalities.vlm.tiny_requests import requests
from mmspec.targets.cache import copy_state
from tests import toys
from tests.covering import covering, exhaustive, limited
from tests.partners import noisy

ROOM = 9
DECODERS = tuple(family for family in toys.FAMILIES if family != "whisper")
# one of every kind of cache, mask and position; the others are slow
KINDS = ("llama", "mistral-sliding", "gemma3", "lfm2", "qwen3_5", "llava", "qwen2_5_vl")
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


@pytest.mark.parametrize(
    ("family", "batch"),
    [
        *[
            (family, "ragged")
            if family in KINDS
            else pytest.param(family, "ragged", marks=pytest.mark.slow)
            for family in DECODERS
        ],
        *[(family, batch) for family in ("llama", "qwen2_5_vl") for batch in ("one", "two")],
    ],
)
def test_a_second_turn_goes_on_as_generate_does(family: str, batch: str) -> None:
    model, request = toys.model(family, layers=3), toys.inputs(family, **BATCHES[batch])
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


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen2_5_vl"])
def test_either_name_of_the_cache_is_taken_without_a_warning(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from `warnings` nor from the logger of transformers."""
    model, request = toys.model(family, layers=3), toys.inputs(family)
    fast = mmspec.accelerate(model, "prompt-lookup")
    _, (first, second) = two_turns(model, request)

    def log(text: str, *_: Any) -> None:
        assert "deprecated" not in text, text

    monkeypatch.setattr(generic.logger, "warning_once", log)
    for name in ("past_key_values", "cache"):
        cache = DynamicCache(config=model.config)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            out = fast.generate(**request, **GREEDY, **{name: cache})
            assert out.cache is out.past_key_values is cache
            assert torch.equal(out.sequences, first.sequences)
            question = next_turn(request, out.sequences)
            given = {**question, **GREEDY, _hf_cache.CACHE_NAME: cache}
            hooked = model.generate(**given, custom_generate=fast, return_dict_in_generate=True)
        assert torch.equal(hooked.sequences, second.sequences)
        assert _hf_cache.output_cache(hooked) is cache
    with pytest.raises(ValueError, match="the same argument; give one"):
        fast.generate(**request, **GREEDY, past_key_values=cache, cache=cache)


@pytest.mark.parametrize("batch", [pytest.param("one", marks=pytest.mark.slow), "ragged"])
@pytest.mark.parametrize("family", limited(["mistral-sliding", "lfm2", "llava", "qwen2_5_vl"], 3))
def test_turns_change_hands(family: str, batch: str) -> None:
    """Ours, `generate()`, ours inside `generate()`, a stream: on one cache, the user's own."""
    model, request = toys.model(family, layers=3), toys.inputs(family, **BATCHES[batch])
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


@pytest.mark.parametrize("batch", [pytest.param("one", marks=pytest.mark.slow), "ragged"])
@pytest.mark.parametrize(
    "family",
    exhaustive(("llama", "mistral-sliding", "lfm2", "qwen2_5_vl"), ("mistral-sliding", "lfm2")),
)
def test_new_tokens_alone_will_do(family: str, batch: str) -> None:
    """A mask over everything says that `input_ids` are the end of a conversation."""
    model, request = toys.model(family, layers=3), toys.inputs(family, **BATCHES[batch])
    (_, question), (first, _) = two_turns(model, request)
    cut = first.sequences.shape[1] - 1  # the last token of the answer is not in the cache
    asked = {
        "input_ids": question["input_ids"][:, cut:],
        "attention_mask": question["attention_mask"],
    }
    settings = {**GREEDY, "repetition_penalty": 1.3}
    kept = [copy.deepcopy(first.past_key_values) for _ in range(3)]
    expected = model.generate(**asked, **settings, past_key_values=kept[0])
    fast = mmspec.accelerate(
        model, "coupled", drafter=noisy("llama", layers=3), sees="nothing", length=3
    )
    out = fast.generate(**asked, **settings, past_key_values=kept[1])
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None
    inside = model.generate(**asked, **settings, past_key_values=kept[2], custom_generate=fast)
    assert torch.equal(inside, expected)
    for cache in kept[1:]:
        assert_same_cache(cache, kept[0])
    seeded: dict[str, Any] = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 2}
    again = [copy.deepcopy(first.past_key_values) for _ in range(2)]
    plain = mmspec.decode_plain(model, **asked, **seeded, past_key_values=again[0]).sequences
    assert torch.equal(fast.generate(**asked, **seeded, past_key_values=again[1]).sequences, plain)


@pytest.mark.parametrize("seed", [0, 1])
def test_padding_of_an_answer_is_left_out_of_the_next_turn(seed: int) -> None:
    """Rows that ended early leave gaps in a conversation; a mask hides them."""
    model, request = (
        toys.model("llama", layers=3),
        toys.inputs("llama", seed=seed, batch=3, ragged=True),
    )
    width = request["input_ids"].shape[1]
    said = model.generate(**request, **GREEDY)
    settings = {**GREEDY, "eos_token_id": int(said[0, width + 3]), "return_dict_in_generate": True}
    first = model.generate(**request, **settings)
    question = next_turn(request, first.sequences)
    gaps = question["input_ids"] == toys.PAD
    assert bool(gaps[0, width:].any())
    question["attention_mask"] = (~gaps).long()
    kept = [copy.deepcopy(first.past_key_values) for _ in range(2)]
    expected = model.generate(**question, **GREEDY, past_key_values=kept[0])
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model("llama", layers=3), length=3)
    out = fast.generate(**question, **GREEDY, past_key_values=kept[1])
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None
    assert out.stats.draft_acceptance_rate > 0.9
    assert_same_cache(kept[1], kept[0])
    assert torch.equal(fast.generate(**question, **GREEDY).sequences, expected)  # without a cache


def static(model: Any) -> Any:
    return StaticCache(config=model.config, max_cache_len=96)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
def test_a_static_cache_is_gone_on_from_and_filled(family: str) -> None:
    model, request = toys.model(family, layers=3), toys.inputs(family)
    theirs, ours = static(model), static(model)
    first = model.generate(**request, **GREEDY, past_key_values=theirs)
    fast = mmspec.accelerate(model, "prompt-lookup")
    assert torch.equal(fast.generate(**request, **GREEDY, past_key_values=ours).sequences, first)
    question = next_turn(request, first)
    second = model.generate(**question, **GREEDY, past_key_values=theirs)
    out = fast.generate(**question, **GREEDY, past_key_values=ours)
    assert torch.equal(out.sequences, second)
    third = next_turn(question, second, seed=6)
    expected = model.generate(**third, **GREEDY, past_key_values=theirs)
    assert torch.equal(model.generate(**third, **GREEDY, past_key_values=ours), expected)


def test_a_request_without_a_cache_is_refused() -> None:
    """Its tokens may differ: `generate()` then reads pictures and windows otherwise."""
    for family in ("llama", "llava", "whisper"):
        model, request = toys.model(family, layers=3), toys.inputs(family)
        fast = mmspec.accelerate(model, "prompt-lookup")
        expected = model.generate(**request, **GREEDY)
        model.generation_config.use_cache = False  # as saved after training with checkpointing
        given: tuple[dict[str, Any], ...] = ({"use_cache": False}, {})
        for how in given:
            with pytest.raises(ValueError, match=r"use_cache=False .*pass use_cache=True"):
                fast.generate(**request, **GREEDY, **how)
            with pytest.raises(ValueError, match=r"use_cache=False .*pass use_cache=True"):
                model.generate(**request, **GREEDY, **how, custom_generate=fast)
        inside = model.generate(**request, **GREEDY, use_cache=True, custom_generate=fast)
        assert torch.equal(inside, expected)


def test_an_abandoned_stream_leaves_the_cache_as_it_was() -> None:
    model, request = toys.model("llama", layers=3), toys.inputs("llama")
    cache = DynamicCache(config=model.config)
    fast = mmspec.accelerate(model, "prompt-lookup")
    stream = fast.stream(**request, **GREEDY, past_key_values=cache)
    next(stream)
    stream.close()
    assert cache.get_seq_length() == 0
    out = fast.generate(**request, **GREEDY, past_key_values=cache)
    assert torch.equal(out.sequences, model.generate(**request, **GREEDY))


def used(model: Any, family: str = "llama", **batch: Any) -> tuple[Request, Any]:
    """A second turn and its cache."""
    request = toys.inputs(family, **batch)
    cache = DynamicCache(config=model.config)
    said = model.generate(**request, **GREEDY, past_key_values=cache)
    return next_turn(request, said), cache


class _Quantized(DynamicLayer):
    """As transformers' quantised layers, whose backends are not installed here."""


def quantised() -> Any:
    make: Any = _Quantized
    return Cache(layers=[make() for _ in range(3)])


def mistakes() -> dict[str, tuple[Any, str]]:
    model = toys.model("llama", layers=3)
    question, cache = used(model)
    short = {name: value[:, :5] for name, value in question.items()}
    wide = {**question, "attention_mask": torch.ones(1, 200, dtype=torch.int64)}
    two = {name: value.repeat(2, 1) for name, value in question.items()}
    other = used(toys.model("llama", layers=2))[1]
    small = StaticCache(config=model.config, max_cache_len=24)
    fresh = toys.inputs("llama")
    return {
        "not a cache": ((question, ((1, 2),)), r"is a tuple, not a Cache.*DynamicCache"),
        "quantised": ((fresh, quantised()), r"has a _Quantized.*give past"),
        "offloaded": ((fresh, Offloaded()), r"offloads its layers.*give past"),
        "another model's": ((question, other), r"has 2 layers and the model 3"),
        "other rows": ((two, cache), r"holds 1 rows and the request has 2"),
        "nothing new": ((short, cache), r"holds \d+ tokens and the request has 5"),
        "a mask of no length": ((wide, cache), r"attention_mask has 200 columns.*give one of"),
        "no room": ((fresh, small), r"room for 24 tokens.*max_cache_len="),
    }


class Offloaded(DynamicCache):
    """As made with `offloading=True`, which wants a device with streams."""

    def __init__(self) -> None:
        super().__init__()
        self.offloading = True


@pytest.mark.parametrize("name", list(mistakes()))
def test_a_cache_that_cannot_be_gone_on_from_is_refused(name: str) -> None:
    (request, cache), message = mistakes()[name]
    fast = mmspec.accelerate(toys.model("llama", layers=3), "prompt-lookup")
    with pytest.raises(ValueError, match=message):
        fast.generate(**request, **GREEDY, past_key_values=cache)


def test_what_reads_the_whole_prompt_refuses_a_part_of_it() -> None:
    model = toys.model("llava", layers=3)
    question, cache = used(model, "llava")
    drafter = toys.model("llava", layers=1)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, sees="target-features")
    with pytest.raises(ValueError, match=r"whole prompt \(vision\).*drop past_key_values"):
        fast.generate(**question, **GREEDY, past_key_values=cache)
    whisper = toys.model("whisper", layers=3)
    fast = mmspec.accelerate(whisper, "prompt-lookup")
    with pytest.raises(ValueError, match="each window is prefilled completely; drop it"):
        fast.generate(**toys.inputs("whisper"), **GREEDY, past_key_values=DynamicCache())


def test_a_draft_model_that_sees_pixels_is_shown_earlier_pictures() -> None:
    model, request = toys.model("llava", layers=3), toys.inputs("llava")
    question, cache = used(model, "llava")
    other = copy.deepcopy(cache)
    expected = model.generate(**question, **GREEDY, past_key_values=cache)
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model("llava", layers=3), length=3)
    shown = {"pixel_values": request["pixel_values"]}
    out = fast.generate(**question, **GREEDY, past_key_values=other, drafter_inputs=shown)
    assert torch.equal(out.sequences, expected)
    assert out.stats.draft_acceptance_rate == 1


def test_ids_behind_a_cache_are_looked_at_too() -> None:
    model = toys.model("llama", layers=3)
    cache = DynamicCache(config=model.config)
    fast, ids = mmspec.accelerate(model, "prompt-lookup"), torch.tensor([[5, 6, 7, 8]])
    fast.generate(input_ids=ids, past_key_values=cache, max_new_tokens=2)
    more = torch.tensor([[5, 6, 7, 8, 9, 10, 10**6]])
    with pytest.raises(ValueError, match="input_ids hold 1000000"):
        fast.generate(input_ids=more, past_key_values=cache, max_new_tokens=2)


LAYERS = (
    "DeepseekV32ForCausalLM",  # an indexer beside keys and values
    "DeepseekV4ForCausalLM",  # compressed layers, kept as they are
    "FalconH1ForCausalLM",  # attention and a recurrent state in one layer
    "Kosmos2_5ForConditionalGeneration",  # asked before a cache, read in its own steps behind
    "MllamaForConditionalGeneration",  # cross-attention to pictures that are given once
)


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *covering(LAYERS, ("ragged", "one"), strength=1),
        *[  # the same with a window
            pytest.param("InklingForCausalLM", batch, marks=pytest.mark.slow)
            for batch in ("one", "ragged")
        ],
    ],
)
def test_a_second_turn_on_every_kind_of_layer(name: str, batch: str) -> None:
    model = survey.build(name)
    request = next(requests(model, 1 if batch == "one" else 2))
    asked, expected = two_turns(model, request)
    cache = None
    for turn, said in zip(asked, expected, strict=True):
        fast = drafted(model, turn, said.sequences)
        out = fast.generate(**turn, **GREEDY, past_key_values=cache, return_dict_in_generate=True)
        assert torch.equal(out.sequences, said.sequences)
        cache = out.past_key_values
        assert type(cache) is type(said.past_key_values)
        assert cache.get_seq_length() == said.past_key_values.get_seq_length()
        for mine, other in zip(cache.layers, said.past_key_values.layers, strict=True):
            pair = [
                [x for x in tree_leaves(copy_state(each)) if isinstance(x, Tensor)]
                for each in (mine, other)
            ]
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)


def test_a_conversation_without_a_picture_goes_on_where_layers_would_attend_to_one() -> None:
    model = survey.build("MllamaForConditionalGeneration")
    request = list(requests(model, 2))[-1]
    assert "pixel_values" not in request
    asked, expected = two_turns(model, request)
    for cache in (copy.deepcopy(expected[0].past_key_values), None):
        fast = drafted(model, asked[0], expected[0].sequences)
        if cache is None:  # filled by us
            cache = DynamicCache(config=model.config)
            fast.generate(**asked[0], **GREEDY, past_key_values=cache)
        fast = drafted(model, asked[1], expected[1].sequences)
        out = fast.generate(**asked[1], **GREEDY, past_key_values=cache)
        assert torch.equal(out.sequences, expected[1].sequences)
