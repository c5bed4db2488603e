"""The public surface behaves as `model.generate` does, and leaves the model alone."""

from __future__ import annotations

import copy
import errno
import json
import threading
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import mmspec
from tests import toys
from tests.covering import covering, limited
from tests.partners import noisy

ROOM = 10
BATCHES: dict[str, dict[str, Any]] = {"one": {}, "ragged": {"batch": 3, "ragged": True}}


def ends(model: Any, request: dict[str, Tensor]) -> list[int]:
    """Two ids that end some rows early."""
    tokens = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    rows = tokens[:, request["input_ids"].shape[1] :].tolist()
    return [rows[0][6], rows[-1][9]]


@pytest.mark.parametrize(
    ("family", "batch"),
    limited(
        covering(
            ("llama", "llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3"),
            ("ragged", "one"),
            strength=1,
        ),
        4,
    ),
)
def test_custom_generate_equals_generate(family: str, batch: str) -> None:
    model, request = toys.model(family), toys.inputs(family, **BATCHES[batch])
    settings: dict[str, Any] = {
        "max_new_tokens": ROOM,
        "do_sample": False,
        "repetition_penalty": 1.2,
        "eos_token_id": ends(model, request),
    }
    expected = model.generate(**request, **settings)
    fast = mmspec.accelerate(model, "prompt-lookup")
    assert fast.last_stats is None
    assert torch.equal(model.generate(**request, **settings, custom_generate=fast), expected)
    assert fast.last_stats is not None
    new = expected[:, request["input_ids"].shape[1] :]
    assert fast.last_stats.num_new_tokens == int((new != toys.PAD).sum())
    fast = mmspec.accelerate(
        model, "coupled", drafter=toys.model("llama"), sees="nothing", length=3
    )
    assert torch.equal(model.generate(**request, **settings, custom_generate=fast), expected)


def test_custom_generate_with_a_drafter_that_sees() -> None:
    """transformers has taken the pixels away by then; the drafter gets them by `drafter_inputs`."""
    model, request = toys.model("llava"), toys.inputs("llava", batch=2)
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model("llava"), length=3)
    tokens = model.generate(
        **request,
        max_new_tokens=ROOM,
        do_sample=False,
        custom_generate=fast,
        drafter_inputs={"pixel_values": request["pixel_values"], "mm_encoder_outputs": None},
    )
    assert torch.equal(tokens, model.generate(**request, max_new_tokens=ROOM, do_sample=False))
    assert fast.last_stats is not None
    assert fast.last_stats.fallback is None
    assert fast.last_stats.draft_acceptance_rate > 0.9


def test_custom_generate_samples() -> None:
    model, request = toys.model("llama"), toys.inputs("llama", batch=2, ragged=True)
    fast = mmspec.accelerate(model, "coupled", drafter=noisy("llama"))
    settings: dict[str, Any] = {"max_new_tokens": ROOM, "do_sample": True, "temperature": 0.9}
    plain = mmspec.decode_plain(model, **request, **settings, seed=4).sequences
    tokens = model.generate(**request, **settings, custom_generate=fast, seed=4)
    assert torch.equal(tokens, plain)
    other = model.generate(**request, **settings, custom_generate=fast, seed=5)
    assert not torch.equal(other, plain)


def test_custom_generate_is_for_its_own_model() -> None:
    fast = mmspec.accelerate(toys.model("llama"), "prompt-lookup")
    request = toys.inputs("llama")
    with pytest.raises(ValueError, match="another model; call accelerate"):
        toys.model("llama").generate(**request, max_new_tokens=4, custom_generate=fast)


@pytest.mark.parametrize("batch", BATCHES)
def test_rows_that_end_early_are_padded_as_generate_does(batch: str) -> None:
    model, request = toys.model("llava"), toys.inputs("llava", **BATCHES[batch])
    model.generation_config.eos_token_id = ends(model, request)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    for name, drafter in (("plain", None), ("prompt-lookup", None), ("coupled", noisy("llava"))):
        fast = mmspec.accelerate(model, name, drafter=drafter)
        out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
        assert torch.equal(out.sequences, expected)
        assert out.sequences.dtype == expected.dtype


@pytest.mark.parametrize("batch", BATCHES)
def test_a_stream_adds_up_to_what_generate_returns(batch: str) -> None:
    model, request = toys.model("llava"), toys.inputs("llava", **BATCHES[batch])
    fast = mmspec.accelerate(model, "coupled", drafter=noisy("llava"), length=4)
    settings: dict[str, Any] = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 3}
    out = fast.generate(**request, **settings)
    rounds = list(fast.stream(**request, **settings))
    for row, sequence in enumerate(out.sequences[:, request["input_ids"].shape[1] :].tolist()):
        assert [token for turn in rounds for token in turn.tokens[row]] == sequence
    assert rounds[-1].finished == (True,) * len(out.sequences)
    assert fast.last_stats is not None
    assert fast.last_stats.per_step_accepted == out.stats.per_step_accepted


def test_a_stream_may_be_left() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model("llama"))
    stream = fast.stream(**request, max_new_tokens=ROOM, do_sample=False)
    first = [next(stream), next(stream)]
    del stream
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    text = [token for turn in first for token in turn.tokens[0]]
    assert text == expected[0, request["input_ids"].shape[1] :][: len(text)].tolist()


class Recorder(BaseStreamer):  # type: ignore[misc,unused-ignore]
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_then_verified_tokens() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    theirs, ours = Recorder(), Recorder()
    tokens = model.generate(**request, max_new_tokens=ROOM, do_sample=False, streamer=theirs)
    fast = mmspec.accelerate(model, "coupled", drafter=toys.model("llama"), length=4)
    fast.generate(**request, max_new_tokens=ROOM, do_sample=False, streamer=ours)
    assert ours.puts[0] == theirs.puts[0] == request["input_ids"][0].tolist()
    assert list(chain(*ours.puts)) == list(chain(*theirs.puts)) == tokens[0].tolist()
    assert len(ours.puts) < len(theirs.puts)
    assert max(map(len, ours.puts[1:])) == 5
    assert ours.ended == theirs.ended == 1


def test_a_saved_recipe_comes_back(tmp_path: Path) -> None:
    model, request = toys.model("llava"), toys.inputs("llava")
    drafter = toys.model("llava", seed=1, layers=1)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, length=3, sees="pixels")
    fast.save_pretrained(tmp_path / "pair")
    assert not list((tmp_path / "pair").rglob("*.bin"))
    again = mmspec.load(tmp_path / "pair", model)
    assert again.recipe.name == "coupled"
    assert again.recipe.execution == fast.recipe.execution
    assert again.sees == "pixels"
    settings: dict[str, Any] = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 1}
    first, second = (each.generate(**request, **settings) for each in (fast, again))
    assert torch.equal(first.sequences, second.sequences)
    saved = again.session.bound.drafter.model.backbone.model.state_dict()
    weights = {
        k: v for k, v in drafter.state_dict().items() if k != "lm_head.bias"
    }  # the toy's own
    assert all(torch.equal(saved[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("prompt-lookup", {"length": 6, "longest": 2}),
        ("coupled", {"tree": [3, 2, 1]}),
        ("coupled", {"tree": "dynamic"}),
        ("coupled", {"length": "auto"}),
        ("coupled", {"verifier": "rejection"}),
    ],
    ids=lambda value: str(value),
)
def test_saved_parts_come_back(tmp_path: Path, name: str, parts: dict[str, Any]) -> None:
    model = toys.model("llama")
    takes = mmspec.recipes.get(name).takes_drafter
    fast = mmspec.accelerate(model, name, drafter=toys.model("llama") if takes else None, **parts)
    fast.save_pretrained(tmp_path)
    again = mmspec.load(tmp_path, model)
    assert repr(again.recipe.execution) == repr(fast.recipe.execution)
    assert again.recipe.verifier == fast.recipe.verifier
    assert again.recipe.options == fast.recipe.options


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no mmspec\.json; .*that save_pretrained wrote"):
        mmspec.load(tmp_path, toys.model("llama"))
    mmspec.accelerate(toys.model("llama"), "prompt-lookup").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names no target model; pass model="):
        mmspec.load(tmp_path)


def traces(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a library might leave something in."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                found[f"{name}.{key}"] = {k: id(v) for k, v in value.items()}
            elif "hooks" in key and isinstance(value, dict):
                found[f"{name}.{key}"] = len(value)
            elif key in ("config", "generation_config"):
                found[f"{name}.{key}"] = value.to_dict()
            elif key == "rope_deltas":
                found[f"{name}.{key}"] = None  # transformers itself writes it at every prefill
            else:
                found[f"{name}.{key}"] = id(value) if callable(value) else repr(value)
    return found


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_5"])
def test_nothing_is_written_onto_the_model(family: str) -> None:
    model, drafter = toys.model(family), noisy(family)
    request = toys.inputs(family, batch=2, ragged=True)
    for each in (model, drafter):  # transformers hangs its own hooks in at the first forward
        each.generate(**request, max_new_tokens=2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before, small = traces(model), traces(drafter)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    fast.generate(**request, max_new_tokens=6, temperature=0.7, top_p=0.8, seed=0)
    mmspec.accelerate(model, "prompt-lookup").generate(**request, max_new_tokens=6)
    assert traces(model) == before
    assert traces(drafter) == small
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(weight.grad_fn for weight in model.parameters())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["coupled", "dynamic-tree", "traversal", "prompt-lookup", "plain"])
def test_statistics_add_up(name: str, batch: str) -> None:
    model, request = toys.model("llama"), toys.inputs("llama", **BATCHES[batch])
    takes = mmspec.recipes.get(name).takes_drafter
    fast = mmspec.accelerate(model, name, drafter=noisy("llama") if takes else None)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    stats, rows = out.stats, len(out.sequences)
    assert json.loads(json.dumps(stats.to_dict()))["recipe"] == stats.recipe == name
    assert set(stats.to_dict()) == set(vars(stats))
    steps, accepted = stats.num_spec_steps, stats.num_accepted_draft_tokens
    assert sum(stats.acceptance_histogram) == steps == len(stats.per_step_accepted)
    assert sum(j * count for j, count in enumerate(stats.acceptance_histogram)) == accepted
    assert sum(stats.per_step_accepted) == accepted
    assert sum(stats.per_step_drafted) == stats.num_draft_tokens
    assert stats.mean_acceptance_length == pytest.approx(1 + accepted / steps if steps else 1)
    if stats.num_draft_tokens:
        assert stats.draft_acceptance_rate == pytest.approx(accepted / stats.num_draft_tokens)
    by_length = stats.acceptance_histogram_by_draft_length
    assert sum(map(sum, by_length.values())) == steps
    assert all(len(counts) == length + 1 for length, counts in by_length.items())
    share = 1.0
    for conditional, marginal in zip(
        stats.conditional_acceptance, stats.per_position_acceptance, strict=True
    ):
        share *= conditional
        assert marginal == pytest.approx(share)
    assert sum(stats.per_position_acceptance) == pytest.approx(accepted / steps if steps else 0)
    assert stats.num_new_tokens == rows * (out.sequences.shape[1] - request["input_ids"].shape[1])
    # every row's first token is the prefill's; each later step of a row adds one of the target's
    # own, unless a stop condition cut it
    own = stats.num_new_tokens - rows - accepted
    assert steps + stats.speculation_off_steps - rows <= own <= steps + stats.speculation_off_steps
    assert stats.tokens_per_target_call == pytest.approx(
        (stats.num_new_tokens - rows) / (steps + stats.speculation_off_steps)
    )
    spent = stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds + stats.host_seconds
    assert stats.total_seconds == pytest.approx(spent)
    assert stats.exact
    assert stats.drafter_saw == fast.sees
    assert stats.fallback is None


def test_the_default_recipe_follows_from_the_drafter() -> None:
    model = toys.model("llama")
    assert mmspec.accelerate(model).recipe.name == "prompt-lookup"
    assert mmspec.accelerate(model, drafter=toys.model("llama")).recipe.name == "coupled"
    assert "coupled" in repr(mmspec.accelerate(model, drafter=toys.model("llama")))


def test_sampling_is_asked_for_as_users_do() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    greedy = model.generate(**request, max_new_tokens=8, do_sample=False)
    fast = mmspec.accelerate(model, "prompt-lookup")
    assert torch.equal(fast.generate(**request, max_new_tokens=8).sequences, greedy)
    assert torch.equal(fast.generate(**request, max_new_tokens=8, temperature=0).sequences, greedy)
    sampled = fast.generate(**request, max_new_tokens=8, temperature=1.0, seed=1).sequences
    again = fast.generate(**request, max_new_tokens=8, do_sample=True, seed=1).sequences
    assert torch.equal(sampled, again)
    assert not torch.equal(sampled, greedy)


def test_torchs_noise_moves_as_it_does_in_generate() -> None:
    """Not in greedy decoding; a sampled call without a seed follows `torch.manual_seed`."""
    model, request = toys.model("llama"), toys.inputs("llama")
    for recipe, drafter in (("prompt-lookup", None), ("coupled", toys.model("llama", layers=1))):
        fast = mmspec.accelerate(model, recipe, drafter=drafter)
        for run in (fast.generate, partial(model.generate, custom_generate=fast)):
            before = torch.get_rng_state()
            run(**request, max_new_tokens=8, do_sample=False)
            assert torch.equal(torch.get_rng_state(), before)
        calls = []
        for _ in range(2):
            torch.manual_seed(3)
            calls += [
                fast.generate(**request, max_new_tokens=8, do_sample=True).sequences.tolist()
                for _ in range(2)
            ]
        assert calls[:2] == calls[2:]
        assert calls[0] != calls[1]


def test_the_names_of_the_package() -> None:
    for name in mmspec.__all__:
        assert getattr(mmspec, name) is not None
    assert set(mmspec.__all__) <= set(dir(mmspec))
    with pytest.raises(AttributeError, match="no attribute 'acelerate'"):
        _ = mmspec.acelerate  # type: ignore[attr-defined]


def test_a_drafter_that_is_never_right_is_pointed_out_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    stranger = toys.model("llama", seed=9, layers=1)
    fast = mmspec.accelerate(model, drafter=stranger)
    with caplog.at_level("WARNING", logger="mmspec"):
        for _ in range(2):
            fast.generate(**request, max_new_tokens=40, do_sample=False)
    said = [record for record in caplog.records if "hardly any" in record.message]
    assert len(said) == 1
    remedies = said[0].getMessage().partition("): ")[2]
    assert remedies.startswith("give a draft model that was trained for this target, or length='au")


@pytest.mark.parametrize("seed", [True, 1.5, "0"], ids=repr)
def test_seeds_and_row_ids_are_whole_numbers(seed: Any) -> None:
    fast, request = mmspec.accelerate(toys.model("llama"), "plain"), toys.inputs("llama")
    with pytest.raises(ValueError, match=f"seed={seed!r} must be a whole number"):
        fast.generate(**request, seed=seed)
    with pytest.raises(ValueError, match=r"row_ids=.* are not whole numbers; give one per row"):
        fast.generate(**request, seed=0, row_ids=[seed])


def test_row_ids_may_be_an_array() -> None:
    """Of whole numbers, one axis: the same noise as of a list."""
    fast, request = mmspec.accelerate(toys.model("llama"), "plain"), toys.inputs("llama", batch=2)
    how: dict[str, Any] = {**request, "temperature": 1.0, "max_new_tokens": 6, "seed": 3}
    listed, ids = fast.generate(**how, row_ids=[5, 7]), np.array([5, 7])
    assert torch.equal(fast.generate(**how, row_ids=ids).sequences, listed.sequences)
    own = fast.model.generate(**how, row_ids=ids, custom_generate=fast, do_sample=True)
    assert torch.equal(own, listed.sequences)
    for wrong in (ids[None], ids + 0.5, np.array(5)):
        with pytest.raises(ValueError, match=r"row_ids=.* are not whole numbers; give one per row"):
            fast.generate(**how, row_ids=wrong)


def test_an_output_has_the_statistics_of_its_own_request() -> None:
    """Another thread finishes on the same object while the first stands in a round."""
    fast, request = mmspec.accelerate(toys.model("llama")), toys.inputs("llama")
    found: list[Any] = []

    def meanwhile(kept: Any) -> None:
        if kept.index == 1:
            other = threading.Thread(
                target=lambda: found.append(fast.generate(**request, max_new_tokens=3))
            )
            other.start()
            other.join()

    found.append(fast.generate(**request, max_new_tokens=9, on_round=meanwhile))
    assert [out.stats.num_new_tokens for out in found] == [3, 9]


def test_a_save_that_breaks_off_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = mmspec.accelerate(toys.model("llama"), "coupled", drafter=noisy("llama"))
    fast.save_pretrained(tmp_path)

    def held() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def full(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    before = held()
    monkeypatch.setattr(fast.session, "save", full)
    with pytest.raises(OSError, match="No space left"):
        fast.save_pretrained(tmp_path)
    assert held() == before
    assert not list(tmp_path.glob(".mmspec-*"))


def test_what_a_session_declares_can_be_asked_and_nothing_else() -> None:
    fast = mmspec.accelerate(toys.model("llama"), "plain")
    assert "generate_images" not in dir(fast)
    assert not hasattr(fast, "transcribe")
    with pytest.raises(AttributeError, match=r"has no transcribe\(\) here; call generate\(\)"):
        fast.transcribe([0.0])
    with pytest.raises(ValueError, match=r"has no transcribe\(\) here; call generate\(\)"):
        next(fast.stream(call="transcribe"))
    assert copy.copy(fast).session is fast.session


def test_a_target_that_drafts_for_itself_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is a control; a gate saves the verification of its own drafts."""
    model, other = toys.model("llama"), toys.model("llama")
    for recipe, drafter, is_warned in (
        ("coupled", model, True),
        ("coupled", other, False),
        ("ugsd", model, False),
        ("prompt-lookup", None, False),
    ):
        caplog.clear()
        with caplog.at_level("WARNING", logger="mmspec"):
            mmspec.accelerate(model, recipe, drafter=drafter)
        assert ("drafter= is the target itself" in caplog.text) == is_warned
