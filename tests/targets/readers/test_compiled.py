"""Compiled blocks: the same tokens, no graph after the first two, and reasons for eager forwards.

The default tests run the same functions uncompiled (`compile="none"`): padded blocks, masks made in
the graph, fixed buffers. Those marked slow compile them.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

import mmspec
from mmspec.draft import Draft, Kind
from mmspec.modalities.common.families import make_reader
from mmspec.models.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from mmspec.targets import fixed
from mmspec.targets.graphs import EAGER
from mmspec.targets.memory import build_block
from mmspec.targets.readers import compiled
from mmspec.targets.readers.compiled import compile_readers
from mmspec.targets.readers.hooks import LayerStatesHook, fill_states, layer_states, record_layers
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering, limited

FAMILIES = ("llama", "llava", "qwen2_5_vl", "mistral-sliding", "gemma3", "qwen3_vl")


def request_of(family: str, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    if batch > 1 and family in toys.VLMS:
        return toys.unequal(family, seed)
    return toys.inputs(family, seed, batch, ragged=batch > 1)


@pytest.mark.parametrize(("batch", "family"), limited(covering([1, 3], FAMILIES, strength=1), 3))
def test_tokens_are_those_of_eager_decoding(family: str, batch: int) -> None:
    model, request = toys.model(family), request_of(family, batch)
    how: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}
    plain = mmspec.decode_plain(model, **request, **how).sequences
    for recipe in ("plain", "prompt-lookup", "token-recycling"):  # one token, chains, trees
        fast = mmspec.accelerate(model, recipe, compile=EAGER)
        out = fast.generate(**request, **how)
        assert torch.equal(out.sequences, plain)
        assert out.stats.compiled_forwards == out.stats.target_calls > 0
        is_deep = family == "qwen3_vl"  # image features inside the decoder: its prompt is eager
        assert ("deepstack" in (out.stats.not_compiled or "")) == is_deep
        assert out.stats.compile["target"] == "compiled"


def test_a_draft_model_is_compiled_too_and_sampling_is_reproducible() -> None:
    model, small = toys.model("llava"), toys.model("llava", layers=1)
    request, how = request_of("llava", 3), {"max_new_tokens": 14, "do_sample": True, "seed": 3}
    plain = mmspec.decode_plain(model, **request, **how).sequences
    fast = mmspec.accelerate(model, "coupled", drafter=small, compile=EAGER)
    out = fast.generate(**request, **how)
    assert torch.equal(out.sequences, plain)
    assert out.stats.compiled_forwards is not None
    assert out.stats.compiled_forwards > out.stats.target_calls
    own = model.generate(**request_of("llava"), custom_generate=fast, max_new_tokens=9)
    assert torch.equal(own, model.generate(**request_of("llava"), max_new_tokens=9))


def test_buffers_grow_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MAX_RESERVED", 0)
    monkeypatch.setattr(compiled, "ROOM", 8)
    monkeypatch.setattr(fixed, "MIN_CAPACITY", 32)
    model, request = toys.model("llama"), request_of("llama", 3)
    fast = mmspec.accelerate(model, "prompt-lookup", compile=EAGER)
    out = fast.generate(**request, max_new_tokens=90)
    assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=90))
    assert out.stats.compiled_forwards == out.stats.target_calls


def test_requests_that_run_at_once_do_not_share_a_buffer() -> None:
    model = toys.model("llama")
    fast = mmspec.accelerate(model, "prompt-lookup", compile=EAGER)
    requests = [request_of("llama", seed=seed) for seed in (1, 2)]
    running = [fast.stream(**one, max_new_tokens=12) for one in requests]
    tokens: list[list[int]] = [[], []]
    for pair in zip(*running, strict=False):
        for own, round_ in zip(tokens, pair, strict=True):
            own.extend(round_.tokens[0])
    for own, one in zip(tokens, requests, strict=True):
        expected = model.generate(**one, max_new_tokens=12)[0, one["input_ids"].shape[1] :]
        assert own == expected[: len(own)].tolist()


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_rows_of_an_engine_join_and_leave_compiled_blocks(family: str) -> None:
    model = toys.model(family)
    fast = mmspec.accelerate(model, "prompt-lookup", compile=EAGER)
    requests = [
        {**toys.inputs(family, seed), "max_new_tokens": 5 + 4 * (seed % 3)} for seed in range(5)
    ]
    with mmspec.Engine(fast, max_rows=3) as engine:
        futures = [engine.submit(one) for one in requests]
        found = [future.result().sequences for future in futures]
    for one, own in zip(requests, found, strict=True):
        assert torch.equal(own, model.generate(**one))
    assert fast.session.bound.compiled.forwards
    assert not fast.session.bound.compiled.reasons


def test_a_returned_cache_is_not_overwritten_by_the_next_request() -> None:
    model, request = toys.model("llama"), request_of("llama")
    fast = mmspec.accelerate(model, "prompt-lookup", compile=EAGER)
    how: dict[str, Any] = {"max_new_tokens": 9, "return_dict_in_generate": True}
    cache = fast.generate(**request, **how).past_key_values
    before = [layer.keys.clone() for layer in cache.layers]
    fast.generate(**request_of("llama", seed=5), **how)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


@torch.no_grad()
@pytest.mark.parametrize("layers", [(0, 1, 3), (2, 3), (1,)])
def test_recorded_states_are_those_of_hooks(layers: tuple[int, ...]) -> None:
    name = layer_states(layers)
    found = []
    for is_compiled in (False, True):
        reader: Any = make_reader(toys.model("llava", layers=3))
        if is_compiled:
            compile_readers(reader, None, {name}, EAGER)
        target = CausalTarget(reader, frozenset({name, "hidden"}))
        memory, _, _ = reader.prefill(request_of("llava"), 20)
        if reader.compiled is not None:
            reader.compiled.prepare(reader, memory, 20)
        draft = Draft.from_tree(Tree((-1, -1, 0)), torch.tensor([[7, 8, 9]]), Kind.DET)
        hooks = target._layers()
        with hooks[name]:
            _, hidden = reader.read(memory, build_block([[5, 6]], draft, memory.like), hidden=True)
        fill_states([hooks[name]], memory)
        found.append((hidden, hooks[name].offer(draft.nodes + 1)))
    for eager, ours in zip(*found, strict=True):
        assert torch.allclose(eager, ours, atol=1e-4)


def test_recording_changes_neither_the_decoder_nor_its_hooks() -> None:
    decoder = toys.model("llama").get_decoder()
    twin, sinks = record_layers(decoder, (0, 1, 2))
    hook = LayerStatesHook(make_reader(toys.model("llama")), (0, 1))
    ids = torch.tensor([[5, 6, 7]])
    decoder(input_ids=ids)
    assert sinks == [[], [], None]
    twin(input_ids=ids)
    assert [None if one is None else len(one) for one in sinks] == [1, 1, None]
    assert hook.noted == {0: [], 1: []}


def test_what_is_not_compiled_says_why_and_runs_eager(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mmspec")
    for family, reason in (("lfm2_vl", "conv"), ("idefics3", "")):
        model, request = toys.model(family), request_of(family)
        fast = mmspec.accelerate(model, "plain", compile=EAGER)
        for _ in range(2):
            caplog.clear()
            out = fast.generate(**request, max_new_tokens=4)
        assert not caplog.records  # one warning
        plain = mmspec.accelerate(model, "plain").generate(**request, max_new_tokens=4)
        assert torch.equal(out.sequences, plain.sequences)
        if reason:
            assert out.stats.compiled_forwards == 0
            assert out.stats.not_compiled is not None
            assert type(model).__name__ in out.stats.not_compiled
            assert reason in out.stats.not_compiled


def test_a_hook_of_the_user_runs_and_so_nothing_is_compiled() -> None:
    model, calls = toys.model("llama"), []
    fast = mmspec.accelerate(model, "plain", compile=EAGER)
    hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    stats = fast.generate(**request_of("llama"), max_new_tokens=4).stats
    assert len(calls) >= 4
    assert "hooks" in stats.not_compiled
    hook.remove()
    assert fast.generate(**request_of("llama"), max_new_tokens=4).stats.compiled_forwards == 3


def test_an_offloaded_model_is_not_compiled() -> None:
    model = toys.model("llama")
    add_hook_to_module(model.model.layers[0], ModelHook())
    fast = mmspec.accelerate(model, "plain", compile=EAGER)
    stats = fast.generate(**request_of("llama"), max_new_tokens=4).stats
    assert "accelerate moves" in stats.not_compiled
    assert stats.compiled_forwards == 0


def test_a_graph_with_other_scores_is_refused_and_the_tokens_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, request = toys.model("llama"), request_of("llama")
    own = fixed.BlockPlan.__init__

    def shifted(self: Any, depths: Any, corner: Any, columns: Any, *rest: Any) -> None:
        own(self, depths, corner, columns, *rest)
        self.positions = self.positions + 3

    monkeypatch.setattr(fixed.BlockPlan, "__init__", shifted)
    fast = mmspec.accelerate(model, "prompt-lookup", compile=EAGER)
    out = fast.generate(**request, max_new_tokens=12)
    assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=12))
    assert out.stats.compiled_forwards == 0
    assert "scores differ" in out.stats.not_compiled


def test_a_backend_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: fail)
    model, request = toys.model("llama"), request_of("llama")
    out = mmspec.accelerate(model, "plain", compile=True).generate(**request, max_new_tokens=6)
    assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=6))
    assert "no C++ compiler" in out.stats.not_compiled


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="compile='fastest' must be"):
        mmspec.accelerate(toys.model("llama"), "plain", compile="fastest")
    with pytest.raises(ValueError, match="compile=True: no forward of modality asr is compiled"):
        mmspec.accelerate(toys.model("whisper"), "plain", compile=True)
    mmspec.accelerate(toys.model("whisper"), "plain", compile=False)


def test_a_twin_without_layers_is_not_compiled() -> None:
    reader: Any = make_reader(toys.model("llama", layers=3))
    compile_readers(reader, None, (), EAGER)
    assert reader.compiled is not None
    assert reader.skip_layers((1,)).compiled is None


COUNTED = [("prompt-lookup", "eager"), ("prompt-lookup", "inductor"), ("eagle-3", "inductor")]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "backend"), COUNTED)
def test_nothing_is_compiled_after_the_first_requests(recipe: str, backend: str) -> None:
    """1 000 tokens and 50 requests of different lengths, among them new capacities.

    A head's drafts of another size, the last ones of an output, are read forward by forward: their
    graphs are made in the first requests too.
    """
    torch._dynamo.reset()  # sizes that it took for dynamic in other tests cost graphs later
    model = toys.model("llama", layers=4, max_position_embeddings=2048)
    head = _head_of(model) if recipe == "eagle-3" else None
    fast = mmspec.accelerate(model, recipe, drafter=head, compile=backend)
    plain = mmspec.accelerate(model, "plain", compile=backend)
    noise = torch.Generator().manual_seed(0)
    tokens = differences = 0
    for index in range(52):
        length = int(torch.randint(2, 500 if index % 5 == 0 else 60, (), generator=noise))
        ids = torch.randint(5, 40, (1, length), generator=noise)
        count = 10 + index % 37
        out, own = (one.generate(input_ids=ids, max_new_tokens=count) for one in (fast, plain))
        assert torch.equal(out.sequences, own.sequences)
        eager = model.generate(input_ids=ids, max_new_tokens=count)
        differences += not torch.equal(out.sequences, eager)
        if index >= 2:
            assert out.stats.compiled_graphs == own.stats.compiled_graphs == 0
            assert out.stats.compiled_forwards >= out.stats.target_calls
            assert out.stats.compile["prompt"] == "compiled"
            tokens += out.stats.num_new_tokens
    assert tokens > 1000
    assert differences == 0


@pytest.mark.slow
def test_compiled_rows_have_the_tokens_of_eager_ones() -> None:
    model, small = toys.model("llava"), toys.model("llava", layers=1)
    request = toys.unequal("llava")
    fast = mmspec.accelerate(model, "coupled", drafter=small, compile=True)
    for _ in range(2):
        out = fast.generate(**request, max_new_tokens=20)
    assert out.stats.compiled_graphs == 0
    assert torch.equal(
        out.sequences, mmspec.decode_plain(model, **request, max_new_tokens=20).sequences
    )


@torch.no_grad()
def test_a_new_head_needs_a_new_graph() -> None:
    reader: Any = make_reader(toys.model("llama"))
    log = compile_readers(reader, None, (), EAGER)
    assert reader.compiled is not None
    for _ in range(2):
        memory, _, _ = reader.prefill(request_of("llama"), 20)
        reader.compiled.prepare(reader, memory, 20)
        block = build_block([[5]], None, memory.like)
        logits, _ = reader.read(memory, block)
        assert torch.allclose(logits, reader.read_eager(memory, block)[0], atol=1e-4)
        head = reader.model.get_output_embeddings()
        other = torch.nn.Linear(head.in_features, head.out_features)
        reader.model.set_output_embeddings(other)
    assert log.forwards == 2
    assert not log.reasons


def _head_of(model: Any, **changes: Any) -> Any:
    text = model.config.get_text_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head: Any = Eagle3Head(Eagle3HeadConfig.of(text, text.vocab_size, **changes))
    return head.eval()


@pytest.mark.parametrize(
    ("case", "batch"),
    limited(
        covering(
            (
                ("llava", {}),
                ("qwen2_5_vl", {"positions": "mrope"}),
                ("llama", {"sliding_window": 6, "num_steps": 2}),
            ),
            (1, 3),
            strength=1,
        ),
        2,
    ),
    ids=str,
)
def test_a_head_on_the_targets_states_reads_compiled_blocks(
    case: tuple[str, dict[str, Any]], batch: int
) -> None:
    family, changes = case
    model, request = toys.model(family, layers=4), request_of(family, batch)
    head, how = _head_of(model, **changes), {"max_new_tokens": 12, "do_sample": False}
    shapes: list[dict[str, Any]] = [{}, {"length": 3}]
    for parts in shapes:
        eager = mmspec.accelerate(model, "eagle-3", drafter=head, **parts)
        fast = mmspec.accelerate(model, "eagle-3", drafter=head, compile=EAGER, **parts)
        expected, out = (one.generate(**request, **how) for one in (eager, fast))
        assert torch.equal(out.sequences, expected.sequences)
        for name in ("per_step_accepted", "per_step_drafted", "target_calls"):
            assert getattr(out.stats, name) == getattr(expected.stats, name)
        assert out.stats.not_compiled is None
        assert out.stats.compiled_forwards is not None
        assert out.stats.compiled_forwards > 3 * out.stats.target_calls  # one is the target's
        assert out.stats.fallback is None
