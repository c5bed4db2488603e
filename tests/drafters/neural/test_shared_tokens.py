"""Draft models of another tokenizer: from shared tokens (TLI), and by their text (UAD)."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import mmspec
from mmspec import zoo
from mmspec.bench.frequency import LENGTH, Subject, measure_frequencies
from mmspec.drafters.neural.reencoded import _Text
from mmspec.modalities.common.tiny_models import joint_distribution, tiny_llama
from mmspec.models.translation import WINDOW, OtherVocabulary, Translation, _load
from tests.toys.tokenizers import byte_tokenizer

OURS, THEIRS = "abcdefgh", "hdbfxcaeg"  # the draft model has "x" as well, and another order
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 3}


@cache
def tokenizers() -> tuple[Any, Any]:
    return byte_tokenizer(list(OURS)), byte_tokenizer(list(THEIRS))


@cache
def target() -> Any:
    model = tiny_llama(len(OURS) + 2, seed=1)
    own = tokenizers()[0]
    model.generation_config.eos_token_id = own.eos_token_id
    model.generation_config.pad_token_id = own.pad_token_id
    model.config.pad_token_id = own.pad_token_id
    return model


@cache
def relabelled() -> Any:
    """The target's own weights with the rows of the draft tokenizer, and a row for "x"."""
    ours, theirs = tokenizers()
    model = tiny_llama(len(THEIRS) + 2, seed=1)
    weights = copy.deepcopy(target().state_dict())
    names = {id: text for text, id in theirs.get_vocab().items()}
    rows = [ours.get_vocab().get(names[id]) for id in range(len(names))]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        own = weights[name]
        weights[name] = torch.stack([own[row] if row is not None else own[0] for row in rows])
    model.load_state_dict(weights)
    return model


@cache
def source() -> OtherVocabulary:
    return OtherVocabulary(relabelled(), tokenizers()[1], tokenizers()[0])


@cache
def request() -> dict[str, Any]:
    made = tokenizers()[0](["abcabcab", "hg"], return_tensors="pt", padding=True)
    return {**made, "max_new_tokens": 30}


@cache
def plain(name: str) -> Tensor:
    how = GREEDY if name == "greedy" else SAMPLED
    found: Tensor = mmspec.accelerate(target(), "plain").generate(**request(), **how).sequences
    return found


@pytest.mark.parametrize("recipe", ["coupled", "dynamic-tree", "tli", "uad"])
def test_a_relabelled_copy_of_the_target_is_accepted(recipe: str) -> None:
    """Wrong ids would be rejected nearly always."""
    fast = mmspec.accelerate(target(), recipe, drafter=source())
    out = fast.generate(**request(), **GREEDY)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences, plain("greedy"))
    assert out.stats.mean_acceptance_length > (3 if recipe == "dynamic-tree" else 4)
    out = fast.generate(**request(), **SAMPLED)
    if fast.recipe.verifier.couples:
        assert torch.equal(out.sequences, plain("sampled"))
    if recipe != "uad":  # it drafts greedily
        assert out.stats.mean_acceptance_length > 3


def test_equal_to_assisted_generation_of_transformers_with_fewer_calls() -> None:
    """The same pair, with `assistant_tokenizer=`: the tokens, and the target's forwards."""
    ours, theirs = tokenizers()
    one = {name: value[:1] for name, value in request().items() if name != "max_new_tokens"}
    how = {**one, **GREEDY, "max_new_tokens": 30}
    calls = [0]
    hook = target().register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    try:
        assistant = copy.deepcopy(relabelled())
        assistant.generation_config.num_assistant_tokens = 5
        assistant.generation_config.eos_token_id = theirs.eos_token_id
        wanted = target().generate(
            **how, assistant_model=assistant, tokenizer=ours, assistant_tokenizer=theirs
        )
    finally:
        hook.remove()
    out = mmspec.accelerate(target(), "uad", drafter=source()).generate(**how)
    assert torch.equal(out.sequences, wanted)
    assert out.stats.target_calls + 1 <= calls[0]  # and the prompt's


def test_only_the_end_of_a_long_text_is_encoded_again() -> None:
    """The ids are those of the whole text, which need not be encoded in every round."""
    read = [AutoTokenizer.from_pretrained(zoo.path(name)) for name in ("text", "llava-chat")]
    sentence = " a small red circle is left of the large blue square, and a green ring is below it."
    cases: Any = ((*tokenizers(), OURS * 40), (*read, sentence * 12))
    for ours, theirs, text in cases:
        translation, encoded = Translation(ours, theirs), list[int]()
        ids, state = ours(text, add_special_tokens=False)["input_ids"], _Text()
        assert len(ids) > 200
        spy = Mock(wraps=translation, encode=Mock(side_effect=translation.encode))
        for count in range(3, len(ids) + 1, 3):
            for _ in range(2):  # of a finished row again
                state.encode(spy, ids[:count])
            assert state.ids == translation.encode(ids[:count])
            assert state.tail == translation.encode(ids[:count][-WINDOW:])
            encoded.append(sum(len(call.args[0]) for call in spy.encode.mock_calls))
            spy.encode.reset_mock()
        assert max(encoded) < 32 * WINDOW  # where a division is looked for
        assert sum(encoded) / len(encoded) < 7 * WINDOW
        assert state.start > len(ids) / 2


def test_the_draft_distribution_is_normalised_on_the_shared_tokens() -> None:
    """q = (1/5, 1/2, 3/10) on two of its tokens is (2/7, 5/7)."""
    fast = mmspec.accelerate(target(), "tli", drafter=source())
    model = fast.session.bound.drafter.model
    logits = torch.full((1, 1, len(THEIRS) + 2), -torch.inf)
    for letter, mass in zip("abx", (1 / 5, 1 / 2, 3 / 10), strict=True):
        logits[0, 0, THEIRS.index(letter)] = torch.tensor(mass).log()
    found = model._spread(logits).softmax(-1)[0, 0]
    wanted = torch.zeros(len(OURS) + 2)
    wanted[0], wanted[1] = 2 / 7, 5 / 7
    torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_drafts_from_shared_tokens_emit_the_distribution_of_the_target() -> None:
    """The draft model has another opinion, lacks "c", and may draft "d", which the target lacks."""
    ours, theirs = byte_tokenizer(["a", "b", "c"]), byte_tokenizer(["b", "d", "a"])
    model = tiny_llama(5, seed=6)
    small = OtherVocabulary(tiny_llama(5, 1, seed=7), theirs, ours)
    fast = mmspec.accelerate(model, "tli", drafter=small)
    prompt = (1, 2, 0, 1, 2)

    def sample(batch: int, first: int, seed: int) -> Tensor:
        ids = torch.tensor([prompt]).expand(batch, -1).contiguous()
        rows = {"row_ids": list(range(first, first + batch)), "seed": seed}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        how: dict[str, Any] = {**inputs, **SAMPLED, **rows, "max_new_tokens": LENGTH + 2}
        out = fast.generate(**how)
        assert 0 < out.stats.draft_acceptance_rate < 1
        found: Tensor = out.sequences[:, len(prompt) : len(prompt) + LENGTH]
        return found

    subject = Subject(joint_distribution(model, LENGTH, prompt), sample)
    assert measure_frequencies(subject, samples=2000, batch=1000).p_value > 1e-4


def test_tokens_that_are_not_shared_are_read_by_their_text() -> None:
    whole = Translation(byte_tokenizer(), tokenizers()[0], frozenset([5]))
    long, letters = byte_tokenizer().get_vocab(), tokenizers()[0].get_vocab()
    assert whole.translate([long["a"], 5, long["b"]]) == [letters["a"], letters["b"]]
    back = Translation(tokenizers()[0], byte_tokenizer())
    assert back.read_prompt([letters["a"]]) == [long["a"]]
    assert back.continue_with([letters["a"]], [long["a"]], [long["b"], long["c"]]) == [
        letters["b"],
        letters["c"],
    ]


def test_folders_with_tokenizers_need_no_object_and_say_which_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder, model, own in zip(("t", "d"), (target(), relabelled()), tokenizers(), strict=True):
        model.save_pretrained(tmp_path / folder)
        own.save_pretrained(tmp_path / folder)
    fast = mmspec.accelerate(str(tmp_path / "t"), drafter=str(tmp_path / "d"))
    assert "share" in caplog.text
    assert "uad" in caplog.text
    out = fast.generate(**request(), **GREEDY)
    assert torch.equal(out.sequences, plain("greedy"))
    assert out.stats.mean_acceptance_length > 4
    fast.save_pretrained(tmp_path / "saved")
    again = mmspec.load(tmp_path / "saved", fast.model).generate(**request(), **GREEDY)
    assert torch.equal(again.sequences, plain("greedy"))


def cache_on_hub(root: Path, name: str, model: Any, tokenizer: Any) -> None:
    """Files as the hub's client caches them: a snapshot, and the revision that is the newest."""
    folder = root / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / (40 * "a")
    model.save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)


@pytest.mark.exhaustive
def test_cached_hub_names_need_no_object_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models = dict(zip(("own/t", "other/d"), (target(), relabelled()), strict=True))
    for (name, model), own in zip(models.items(), tokenizers(), strict=True):
        cache_on_hub(tmp_path, name, model, own)
        model = copy.deepcopy(model)
        model.config._name_or_path = name  # as from_pretrained(name) leaves it
        models[name] = model
    with pytest.raises(ValueError, match=r"both tokenizers: mmspec\..*OtherVocabulary"):
        mmspec.accelerate(models["own/t"], drafter=models["other/d"])  # nothing is cached there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    fast = mmspec.accelerate(models["own/t"], drafter=models["other/d"])
    assert "of its tokens that are shared" in caplog.text
    out = fast.generate(**request(), **GREEDY)
    assert torch.equal(out.sequences, plain("greedy"))
    assert out.stats.mean_acceptance_length > 4
    (snapshot,) = (tmp_path / "models--other--d" / "snapshots").iterdir()
    (snapshot / "tokenizer_config.json").write_text("{")  # damaged: the ids are compared
    _load.cache_clear()
    with pytest.raises(ValueError, match=r"vocabulary of|cannot draft for"):
        mmspec.accelerate(models["own/t"], drafter=models["other/d"])


def test_a_tokenizer_with_code_of_its_own_is_not_run_and_nobody_is_prompted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers()[1].save_pretrained(tmp_path)
    assert _load(str(tmp_path)) is not None
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text("from transformers import PreTrainedTokenizerFast as Own\n")
    prompt = Mock(return_value="y")
    monkeypatch.setattr("builtins.input", prompt)
    _load.cache_clear()
    assert _load(str(tmp_path)) is None
    prompt.assert_not_called()


def test_requests_join_in_an_engine() -> None:
    prompt = request()["input_ids"][:1]
    cases = [{"input_ids": prompt[:, :n], "max_new_tokens": 12, **GREEDY} for n in (8, 5, 7)]
    for recipe in ("coupled", "uad"):
        fast = mmspec.accelerate(target(), recipe, drafter=source())
        with mmspec.Engine(fast, max_rows=3) as engine:
            done = [future.result() for future in [engine.submit(one) for one in cases]]
        for one, given in zip(done, cases, strict=True):
            alone = fast.generate(**given).sequences[0, given["input_ids"].shape[1] :].tolist()
            assert list(one.tokens) == alone[: len(one.tokens)]


def test_what_cannot_draft_is_refused() -> None:
    ours, theirs = byte_tokenizer(["a", "b"]), byte_tokenizer(list("uvwxyz"))
    model, small = tiny_llama(4), tiny_llama(8)
    with pytest.raises(ValueError, match=r"shares .* too few to draft from; use recipe='uad'"):
        mmspec.accelerate(model, "coupled", drafter=OtherVocabulary(small, theirs, ours))
    with pytest.raises(ValueError, match="is no tokenizer of transformers"):
        OtherVocabulary(small, 5, ours)
    with pytest.raises(ValueError, match=r"not known; give drafter=.*OtherVocabulary"):
        mmspec.accelerate(model, "uad", drafter=small)
    with pytest.raises(ValueError, match="a draft model, and drafter= is an OtherVocabulary"):
        mmspec.accelerate(model, "pearl", drafter=OtherVocabulary(small, theirs, ours))
