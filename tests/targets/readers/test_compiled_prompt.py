"""Compiled prompts: the tokens and scores of eager ones, and padding without influence.

The default tests run the same function uncompiled (`compile="none"`): padded prompts, masks and
writes to fixed buffers. `test_compiled.py` counts graphs.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import mmspec
from mmspec._hf_cache import CACHE_NAME
from mmspec.modalities.common.families import make_reader
from mmspec.targets import fixed, prompts
from mmspec.targets.graphs import EAGER
from mmspec.targets.prompts import STEP, round_prompt
from mmspec.targets.readers import compiled_prompt
from mmspec.targets.readers.compiled import compile_readers
from tests import toys
from tests.covering import covering, limited
from tests.targets.readers.test_compiled import FAMILIES, _head_of, request_of
from tests.targets.tokens.test_chunks import lengthen


def read(reader: Any, request: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits (B, V) after a prompt, and its keys and values (2 layers, B, heads, L, width)."""
    memory, logits, _ = reader.prefill(request, 20)
    length = memory.lengths[0]
    reader.prepare_graphs(memory, 20)
    return logits, memory.cache.plan.pool.buffer[:, :, :, :length].clone()


def hide_padding(states: Tensor, request: dict[str, Any]) -> Tensor:
    mask: Tensor = request["attention_mask"]
    return states * mask[None, :, None, :, None]


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", limited([name for name in FAMILIES if name != "qwen3_vl"], 3))
def test_scores_and_cache_are_those_of_eager_prompts(family: str, batch: int) -> None:
    reader, own = make_reader(toys.model(family)), make_reader(toys.model(family))
    log = compile_readers(reader, None, (), EAGER)
    for seed in range(3):
        request = request_of(family, batch, seed)
        (logits, states), (expected, others) = read(reader, request), read(own, request)
        assert torch.allclose(logits, expected, atol=2e-5)
        states, others = (hide_padding(one, request) for one in (states, others))
        assert torch.allclose(states, others, atol=2e-5)
    assert log.runs["prompt"] == 3
    assert not log.reasons


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "batch"), [("llava", 1), ("llava", 3), ("mistral-sliding", 1), ("gemma3", 3)]
)
def test_padding_has_no_influence(family: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in the padded slots. Control: with a mask that shows them, it has."""
    reader: Any = make_reader(toys.model(family))
    compile_readers(reader, None, (), EAGER)
    request = request_of(family, batch, 1)
    read(reader, request)
    own, found = fixed.pad, []
    assert request["input_ids"].shape[1] % STEP

    def fill(x: Tensor, shape: Any, value: float = 0) -> Tensor:
        is_carrier = shape[1:2] == (round_prompt(x.shape[1]),) and not value
        return own(x, shape, 9 if is_carrier else value)

    def show(hidden: Tensor, kinds: Any, window: int | None) -> dict[str, Tensor]:
        length = hidden.shape[1]
        return dict.fromkeys(kinds, hidden[:, None, None].expand(-1, 1, length, length))

    filled, shown = (prompts, "pad", fill), (compiled_prompt, "make_masks", show)
    for changes in ((filled,), (shown,), (filled, shown)):
        with monkeypatch.context() as patched:
            for change in changes:
                patched.setattr(*change)
            found.append(read(reader, request)[0])
    clean = read(reader, request)[0]
    assert torch.equal(found[0], clean)
    if family != "gemma3":  # which makes masks of its own
        assert float((found[1] - found[2]).abs().max()) > 1e-2


def test_a_graph_that_attends_to_padding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(hidden: Tensor, kinds: Any, window: int | None) -> dict[str, Tensor]:
        length = hidden.shape[1]
        return dict.fromkeys(kinds, hidden[:, None, None].expand(-1, 1, length, length))

    monkeypatch.setattr(compiled_prompt, "make_masks", show)
    model, request = toys.model("llava"), request_of("llava")
    fast = mmspec.accelerate(model, "plain", compile=EAGER)
    for _ in range(2):
        out = fast.generate(**request, max_new_tokens=8)
        assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=8))
    assert "scores differ" in out.stats.compile["prompt"]
    assert out.stats.compile["target"] == "compiled"


@pytest.mark.parametrize(("batch", "recipe"), covering([1, 3], ["coupled", "eagle-3"], strength=1))
def test_drafters_read_compiled_prompts_too(recipe: str, batch: int) -> None:
    """Sampled tokens of many requests, and the drafts of eager ones."""
    model = toys.model("llava", layers=4)
    drafter = _head_of(model) if recipe == "eagle-3" else toys.model("llava", layers=1)
    eager, fast = (
        mmspec.accelerate(model, recipe, drafter=drafter, **more)
        for more in ({}, {"compile": EAGER})
    )
    for seed in range(3):
        request = request_of("llava", batch, seed)
        how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": seed}
        expected, out = (one.generate(**request, **how) for one in (eager, fast))
        assert torch.equal(out.sequences, expected.sequences)
        assert out.stats.per_step_accepted == expected.stats.per_step_accepted
    assert out.stats.compile["prompt"] == "compiled"
    assert fast.session.bound.compiled.runs["prompt"] == 2


def test_long_and_continued_prompts_run_eager_and_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_prompt, "MAX_SLOTS", 32)
    model, request = toys.model("llama"), request_of("llama")
    fast = mmspec.accelerate(model, "prompt-lookup", compile=EAGER)
    long = lengthen(request, 40)
    for _ in range(2):
        out = fast.generate(**long, max_new_tokens=8)
        assert torch.equal(out.sequences, model.generate(**long, max_new_tokens=8))
    assert "more than 32 slots" in out.stats.compile["prompt"]
    how: dict[str, Any] = {"max_new_tokens": 8, "return_dict_in_generate": True}
    before = (DynamicCache(config=model.config), DynamicCache(config=model.config))
    turn = request
    for _ in range(2):
        out = fast.generate(**turn, **how, past_key_values=before[0])
        own = model.generate(**turn, **how, **{CACHE_NAME: before[1]})
        assert torch.equal(out.sequences, own.sequences)
        turn = {"input_ids": torch.cat((own.sequences, torch.tensor([[7, 8]])), 1)}


def test_prompts_beside_running_rows() -> None:
    """An engine reads prompts together, and a long one in chunks, while rows are decoded."""
    model = toys.model("llava")
    fast = mmspec.accelerate(model, "prompt-lookup", compile=EAGER)
    requests = [request_of("llava", seed=seed) for seed in range(5)]
    requests[3] = lengthen(requests[3], 40)
    counts = [6, 14, 4, 9, 11]
    with mmspec.Engine(fast, max_rows=3, max_prompt_slots=24) as engine:
        pairs = zip(requests, counts, strict=True)
        futures = [engine.submit({**one, "max_new_tokens": count}) for one, count in pairs]
        found = [future.result().sequences for future in futures]
    for one, count, own in zip(requests, counts, found, strict=True):
        assert torch.equal(own, model.generate(**one, max_new_tokens=count))
    assert fast.session.bound.compiled.runs["prompt"]


def test_requests_at_once_have_buffers_of_their_own_and_return_them() -> None:
    model = toys.model("llama")
    fast = mmspec.accelerate(model, "plain", compile=EAGER)
    fast.generate(**request_of("llama"), max_new_tokens=4)
    requests = [request_of("llama", seed=seed) for seed in (1, 2)]
    running = [fast.stream(**one, max_new_tokens=8) for one in requests]
    tokens: list[list[int]] = [[], []]
    for pair in zip(*running, strict=False):
        for own, round_ in zip(tokens, pair, strict=True):
            own.extend(round_.tokens[0])
    for own, one in zip(tokens, requests, strict=True):
        expected = model.generate(**one, max_new_tokens=8)[0, one["input_ids"].shape[1] :]
        assert own == expected[: len(own)].tolist()
    del running, pair, round_
    gc.collect()
    graphs = fast.session.bound.backbone.compiled.graphs
    assert not len(graphs.prompts.buffers)
    assert [len(free) for free in graphs.store.free.values()] == [2]


@torch.no_grad()
def test_a_changed_model_is_compiled_anew() -> None:
    reader: Any = make_reader(toys.model("llama"))
    compile_readers(reader, None, (), EAGER)
    request = request_of("llama")
    for _ in range(2):
        logits, _ = read(reader, request)
        layer = reader.model.model.layers[0].mlp
        layer.down_proj = torch.nn.Linear(layer.down_proj.in_features, reader.config.hidden_size)
    changed, _ = read(reader, request)
    assert not torch.allclose(changed, logits, atol=1e-3)
    assert torch.allclose(changed, reader.model(**request).logits[:, -1], atol=2e-5)


@torch.no_grad()
def test_another_attention_is_compiled_anew() -> None:
    reader: Any = make_reader(toys.model("llama"))
    compile_readers(reader, None, (), EAGER)
    versions = []
    for kernel in ("sdpa", "sdpa", "eager"):
        reader.model.set_attn_implementation(kernel)
        read(reader, request_of("llama"))
        versions.append(reader.compiled.graphs.prompts.graphs.version)
    assert versions[0] == versions[1] < versions[2]


@pytest.mark.slow
@torch.no_grad()
def test_another_adapter_is_compiled_anew() -> None:
    """Names and scales of adapters are constants in a graph."""
    peft = pytest.importorskip("peft")
    how: dict[str, Any] = {"target_modules": ["q_proj"], "init_lora_weights": False}
    model = toys.model("llama", layers=1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(lora_alpha=64, **how), "first").eval()
    adapted.add_adapter("second", peft.LoraConfig(lora_alpha=32, **how))
    reader: Any = make_reader(model)
    log, request = compile_readers(reader, None, (), "eager"), request_of("llama")
    for name in ("first", "second", "second"):
        adapted.set_adapter(name)
        logits, _ = read(reader, request)
        assert torch.allclose(logits, model(**request).logits[:, -1], atol=2e-5)
    assert log.runs["prompt"] == 3
    assert not log.reasons


def test_inputs_inside_the_decoder_run_eager_and_say_so() -> None:
    model, request = toys.model("qwen3_vl"), request_of("qwen3_vl")
    fast = mmspec.accelerate(model, "plain", compile=EAGER)
    for _ in range(2):
        out = fast.generate(**request, max_new_tokens=6)
        assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=6))
    assert "deepstack_visual_embeds" in out.stats.compile["prompt"]
    text = toys.inputs("llama", 0, 1)
    for _ in range(2):
        out = fast.generate(input_ids=text["input_ids"], max_new_tokens=6)
    assert fast.session.bound.compiled.runs["prompt"] == 1
