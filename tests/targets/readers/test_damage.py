"""What the check is for: each way of misreading a model, put in on purpose, is found and named."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec import _hf
from mmspec.drafters.oracle import Oracle
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory
from mmspec.targets.readers import check, rounding
from mmspec.targets.readers.backbone import Backbone
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering
from tests.toys.texts import prompts, text

ROOM = 8
WIDE = Tree.branching([2, 2, 1])


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    """Verdicts on damaged code are nobody else's."""
    check.clear_cache()
    yield
    check.clear_cache()


def drafted(model: Any, request: dict[str, Tensor], shape: Any) -> tuple[Tensor, Tensor]:
    """Our tokens and the model's own."""
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    rows = expected[:, request["input_ids"].shape[1] :].tolist()
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle(rows, 0.4, tree=shape, seed=1))
    return fast.generate(**request, max_new_tokens=ROOM, do_sample=False).sequences, expected


def assert_caught(model: Any, request: dict[str, Tensor], cause: str) -> None:
    """Trees are refused by what differs; chains are still exact, read as the model's own steps."""
    with pytest.raises(ValueError, match=f"{type(model).__name__} scores .*{cause}.* differ; give"):
        drafted(model, request, WIDE)
    check.clear_cache()
    ours, expected = drafted(model, request, 4)
    assert torch.equal(ours, expected)


def shifted(self: Memory, block: Any) -> Any:
    positions, mask, queries = PLACE(self, block)
    return positions + 1, mask, queries


PLACE = Memory.place


@pytest.mark.parametrize(
    ("batch", "family"), covering([1, 3], ["llama", "llava", "qwen2_5_vl"], strength=1)
)
def test_positions_shifted_by_one(family: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "place", shifted)
    request = toys.inputs(family, batch=batch, ragged=batch > 1)
    assert_caught(toys.model(family), request, r"positions \(those \+1\)")


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3"])
def test_a_window_that_is_ignored(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "mask_window", lambda self, mask, queries: mask)
    monkeypatch.setattr(Memory, "place", without_window)
    assert_caught(toys.model(family), toys.inputs(family), "a window")


def without_window(self: Memory, block: Any) -> Any:
    """Sliding layers read everything."""
    placed = PLACE(self, block)
    self.cache.plan.low = 0
    return placed


def test_a_window_in_a_deep_layer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers hold one of each kind, whatever their order."""
    monkeypatch.setattr(Memory, "mask_window", lambda self, mask, queries: mask)
    monkeypatch.setattr(Memory, "place", without_window)
    kinds = ["full_attention"] * 3 + ["sliding_attention"] * 3
    model = toys.model("gemma3-text", layers=6, layer_types=kinds)
    assert_caught(model, toys.inputs("gemma3-text"), "a window")


def test_an_input_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backbone, "_extra_step_inputs", lambda *_: {})
    request = prompts(1)
    request["token_type_ids"] = torch.ones_like(request["input_ids"])
    model = text("gpt2")
    for shape in (4, WIDE):
        with pytest.raises(ValueError, match=r"GPT2LMHeadModel scores .*further inputs differ; "):
            drafted(model, request, shape)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_states_that_are_not_brought_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "restore", lambda *_: None)
    with pytest.raises(ValueError, match="what the cache keeps of a rejected draft differ; use"):
        drafted(toys.model(family), toys.inputs(family), 4)


@pytest.mark.parametrize("family", ["llama", "paligemma", "whisper"])
def test_a_cache_that_forgets_to_crop(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(self: Memory, steps: list[int]) -> None:
        ADVANCE(self, [step + 1 for step in steps])

    monkeypatch.setattr(Memory, "advance", advance)
    model, request = toys.model(family), toys.inputs(family)
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle([[5, 6, 7, 8]], tree=4))
    with pytest.raises(ValueError, match="scores a chain"):
        fast.generate(**request, max_new_tokens=ROOM)


ADVANCE = Memory.advance


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_5_vl"])
def test_a_request_of_embeddings_is_asked_as_it_is(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, request = toys.model(family), toys.inputs(family)
    words = model.get_input_embeddings()(request["input_ids"]).detach()
    asked = {"inputs_embeds": words, "attention_mask": request["attention_mask"]}
    expected = model.generate(**asked, max_new_tokens=ROOM, do_sample=False)
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle(expected.tolist(), 0.4, tree=WIDE))
    ours = fast.generate(**asked, max_new_tokens=ROOM, do_sample=False).sequences
    assert torch.equal(ours, expected)
    assert check._verdicts
    check.clear_cache()
    monkeypatch.setattr(Memory, "place", shifted)
    with pytest.raises(ValueError, match=rf"{type(model).__name__} scores a .*\(those \+1\)"):
        fast.generate(**asked, max_new_tokens=ROOM)


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_5_vl", "lfm2_vl"])
def test_a_second_turn_has_a_class_asked_with_words(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model noted of the picture is left as it was."""
    model, request = toys.model(family), toys.inputs(family)
    said = model.generate(**request, max_new_tokens=4, return_dict_in_generate=True)
    noted = vars(model.model).get("rope_deltas")
    before, ids = copy.deepcopy(noted), torch.cat((said.sequences, said.sequences[:, -3:]), 1)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    again = {**asked, "past_key_values": copy.deepcopy(said.past_key_values)}
    expected = model.generate(**again, max_new_tokens=ROOM, do_sample=False)[:, ids.shape[1] :]
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle(expected.tolist(), 0.4, tree=3))
    again["past_key_values"] = copy.deepcopy(said.past_key_values)
    ours = fast.generate(**again, max_new_tokens=ROOM, do_sample=False).sequences
    assert torch.equal(ours[:, ids.shape[1] :], expected)
    assert check._verdicts
    assert before is None or torch.equal(before, model.model.rope_deltas)
    check.clear_cache()
    monkeypatch.setattr(Memory, "place", shifted)
    monkeypatch.setattr(SlotCache, "restore", lambda *_: None)
    again["past_key_values"] = copy.deepcopy(said.past_key_values)
    if family == "lfm2_vl":
        with pytest.raises(ValueError, match="scores a chain"):
            fast.generate(**again, max_new_tokens=ROOM)
        return
    ours = fast.generate(**again, max_new_tokens=ROOM, do_sample=False).sequences
    assert torch.equal(ours[:, ids.shape[1] :], expected)  # read as the model's own steps


def test_what_is_refused_is_refused_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "restore", lambda *_: None)
    model, request = toys.model("lfm2"), toys.inputs("lfm2")
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle([[5, 6, 7, 8]], tree=4))
    for _ in range(2):
        with pytest.raises(ValueError, match="Lfm2ForCausalLM"):
            fast.generate(**request, max_new_tokens=ROOM)
    monkeypatch.undo()
    assert fast.generate(**request, max_new_tokens=ROOM).stats.target_calls


@pytest.mark.parametrize(
    ("family", "batch", "name"),
    [("llama", 3, "attention_mask"), ("gemma3", 1, "token_type_ids"), ("llava", 1, "position_ids")],
)
def test_a_prompt_that_is_read_otherwise(
    family: str, batch: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a prompt leaves in the first layers tells, whatever its last logits are."""
    own = _hf.prepare_prefill_inputs

    def changed(*given: Any) -> dict[str, Any]:
        made = own(*given)
        if name == "position_ids":
            return {**made, name: 2 * made[name]}
        del made[name]
        return made

    monkeypatch.setattr(_hf, "prepare_prefill_inputs", changed)
    request = toys.inputs(family, batch=batch, ragged=batch > 1)
    with pytest.raises(ValueError, match=r"scores a chain of .* the mask of the prompt differ"):
        drafted(toys.model(family, layers=4), request, 4)


@pytest.mark.parametrize(
    ("dtype", "margin"), [(torch.float32, 2e-3), (torch.bfloat16, 0.13), (torch.float16, 0.047)]
)
@pytest.mark.parametrize("shape", [4, WIDE], ids=["chain", "tree"])
def test_what_lies_above_the_margin_is_caught(
    shape: Any, dtype: torch.dtype, margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that are off by a share of their spread: a third of the margin passes, twice not."""
    read, part = Backbone.read, 1 / 3

    def off(self: Backbone, *given: Any, **how: Any) -> Any:
        scores, states = read(self, *given, **how)
        best = scores.float().topk(rounding.BEST, -1).values
        sign = 1 - 2 * (torch.arange(scores.shape[-1]) % 2)
        apart = part * margin * best.std(-1, keepdim=True) * sign
        return scores + apart.to(scores.dtype), states

    monkeypatch.setattr(Backbone, "read", off)
    model = toys.model("llama").to(dtype)
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle([[5, 6, 7, 8]], tree=shape))
    fast.generate(**toys.inputs("llama"), max_new_tokens=2)
    check.clear_cache()
    part = 2.0
    with pytest.raises(ValueError, match=r"LlamaForCausalLM scores a .* of drafted tokens"):
        fast.generate(**toys.inputs("llama"), max_new_tokens=2)


def test_a_prompt_within_a_window_says_nothing_about_longer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, long = toys.model("mistral-sliding"), toys.inputs("mistral-sliding")
    short = {name: value[:, -6:] for name, value in long.items()}
    monkeypatch.setattr(Memory, "mask_window", lambda self, mask, queries: mask)
    monkeypatch.setattr(Memory, "place", without_window)
    ours, expected = drafted(model, short, WIDE)
    assert torch.equal(ours, expected)
    with pytest.raises(ValueError, match=r"a window.* differ; give"):
        drafted(model, long, WIDE)
