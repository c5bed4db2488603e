"""Dia: requests, refusals, folders, commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DacModel, DiaProcessor

import mmspec
from mmspec import bench
from mmspec.modalities.speech.frames import tiny_models
from mmspec.modalities.speech.frames.dia import DiaReader
from mmspec.modalities.speech.frames.tiny_models import BOOKS, CODES
from tests.cli.running import fail, run
from tests.covering import limited

TEXTS = ["[S1] hello", "[S2] ab"]
REQUEST = tiny_models.tiny_request("end", 2)
START = REQUEST["decoder_input_ids"]
MASK = torch.ones(START.shape[:2])


def fast(recipe: str = "frame-plain", **parts: Any) -> mmspec.Accelerated:
    given = {"processor": tiny_models.dia_processor(), **parts}
    return mmspec.accelerate(tiny_models.dia(2), recipe, **given)


def codes(out: Any) -> list[Any]:
    return [row.tolist() for row in out.codes]


def test_a_text_is_what_the_processor_makes_of_it() -> None:
    session = fast().session
    inputs, settings = session.prepare_arguments({"text": TEXTS, "max_new_tokens": 8})
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape
    assert torch.equal(inputs["decoder_input_ids"].long(), START)
    assert inputs["decoder_attention_mask"].tolist() == MASK.tolist()
    how = (settings.max_frames, settings.guidance, settings.guidance_top_k)
    assert how == (8, tiny_models.GUIDANCE, CODES + 1)
    seconds = session.prepare_arguments({"text": "a", "seconds": 5 * session.codec.hop / 1000})[1]
    assert seconds.max_frames == 5 + BOOKS - 1 + 1  # the delay, and the end


@pytest.mark.parametrize("limit", ["max_length", "max_new_tokens"])
def test_a_length_of_the_configuration_is_that_of_generate(limit: str) -> None:
    model = tiny_models.dia(2)
    setattr(model.generation_config, limit, 9)
    one = mmspec.accelerate(model, "frame-plain", processor=tiny_models.dia_processor())
    given = {name: row[1:] for name, row in REQUEST.items() if name != "max_new_tokens"}
    made = model.generate(**given, do_sample=False)
    assert one.session.prepare_arguments(given)[1].max_frames == made.shape[1] - 1


def test_a_mask_and_the_numbers_of_rows_change_nothing() -> None:
    given = {**REQUEST, "max_new_tokens": 8, "seed": 1}
    plain = codes(fast().synthesize(**given))
    masked = {**given, "decoder_attention_mask": MASK, "attention_mask": None}
    assert codes(fast().synthesize(**masked)) == plain
    assert codes(fast().synthesize(**given, row_ids=[1, 0])) == plain[::-1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no start": ({"decoder_input_ids": None}, "decoder_input_ids are given"),
    "flat start": ({"decoder_input_ids": START[0]}, r"integers \(B, S, K\)"),
    "other rows": ({"decoder_input_ids": START[:1]}, r"here \(2, 3, 3\)"),
    "no numbers": ({"decoder_input_ids": START.float()}, "integers"),
    "no code": ({"decoder_input_ids": START + 1}, "codes are within 0 to 6"),
    "no delay": ({"decoder_input_ids": START.flip(-1)}, "all books have as many codes"),
    "long delay": ({"decoder_input_ids": START.repeat_interleave(2, 1)}, "follow the delays"),
    "padding on the right": (
        {"decoder_attention_mask": MASK.flip(1) - torch.eye(3)[2]},
        "0 for padding on the left",
    ),
    "all padding": ({"decoder_attention_mask": MASK * 0}, "0 for padding on the left"),
    "short mask": ({"decoder_attention_mask": MASK[:, :2]}, "0 for padding on the left"),
    "cold": ({"temperature": 0.7}, r"temperature=0\.7: generate\(\) of DiaForCond.* below 1"),
    "no top-k": ({"top_k": 0}, "Dia's guidance selects the top_k most likely codes itself"),
    "wide top-k": ({"top_k": 99}, "give 1 to 7, or guidance=1"),
    "no frame": ({"max_new_tokens": 3}, "at least 4"),
    "a list": ({"decoder_input_ids": [[1]]}, "must be a tensor"),
    "audio": ({"input_values": torch.zeros(2, 8)}, "input_values"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused(case: str) -> None:
    given, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        fast().synthesize(**{**REQUEST, **given})


def test_a_voice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes speakers from its text \(\[S1\], \[S2\]\)"):
        fast().synthesize("hello", voice="anna")


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="codec of DiaForConditionalGeneration is part of its pro"):
        fast(processor=None)
    with pytest.raises(ValueError, match="has no codec"):
        fast(processor=tiny_models.dia_processor().tokenizer)
    with pytest.raises(ValueError, match="cannot draft for Dia"):
        fast("frame-coupled", drafter=tiny_models.csm())
    other = tiny_models.dia(1)
    other.config.delay_pattern = [0, 2, 3]
    with pytest.raises(ValueError, match=r"has delays \(0, 2, 3\), the target delays"):
        fast("frame-coupled", drafter=other)
    other.config.delay_pattern, other.config.decoder_config.bos_token_id = [0, 1, 2], 5
    other.config.encoder_config.vocab_size = 200
    with pytest.raises(ValueError, match="beginning 5, text tokens 200, the target beginning 6"):
        fast("frame-coupled", drafter=other)
    other.config.delay_pattern = [1, 2, 3]
    with pytest.raises(ValueError, match=r"delay_pattern=\[1, 2, 3\].* must be 0"):
        DiaReader(other)
    other.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="would not stop at the end of speech"):
        DiaReader(other)
    own = tiny_models.dia(1)
    own.generation_config.min_new_tokens = 4
    with pytest.raises(ValueError, match="min_new_tokens=4"):
        mmspec.accelerate(own, processor=tiny_models.dia_processor()).synthesize(**REQUEST)


@pytest.mark.parametrize("scale", limited([0, 0.5, -2.0, True], 2))
def test_a_configured_guidance_that_generate_refuses_is_refused(scale: Any) -> None:
    own = tiny_models.dia(2)
    own.generation_config.guidance_scale = scale
    one = mmspec.accelerate(own, processor=tiny_models.dia_processor())
    if scale is not True:  # which is 1 to transformers
        with pytest.raises(ValueError, match="guidance scale"):
            own.generate(**REQUEST, do_sample=False)
    with pytest.raises(ValueError, match=r"guidance_scale of the generation .* of at least 1"):
        one.synthesize(**REQUEST)
    assert len(one.synthesize(**REQUEST, guidance=1).codes) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its processor, and the codec in a folder that the processor names."""
    made = tmp_path_factory.mktemp("dia")
    own = tiny_models.dia_processor()
    own.audio_tokenizer.save_pretrained(made / "codec")
    codec = DacModel.from_pretrained(made / "codec")
    DiaProcessor(own.feature_extractor, own.tokenizer, codec).save_pretrained(made)
    tiny_models.dia(2).save_pretrained(made)
    return made


def test_folders_are_loaded_and_saved(folder: Path, tmp_path: Path) -> None:
    small = tiny_models.dia(3, 1)
    small.save_pretrained(tmp_path / "small")
    one = mmspec.accelerate(folder, "frame-coupled", drafter=str(tmp_path / "small"))
    out = one.synthesize(TEXTS, max_new_tokens=8, seed=4)
    wanted = fast("frame-coupled", drafter=small).synthesize(TEXTS, max_new_tokens=8, seed=4)
    assert codes(out) == codes(wanted)
    assert all(map(torch.equal, out.waveforms, wanted.waveforms))
    one.save_pretrained(tmp_path / "saved")
    for again in (mmspec.load(tmp_path / "saved"), mmspec.load(tmp_path / "saved", one.model)):
        assert codes(again.synthesize(TEXTS, max_new_tokens=8, seed=4)) == codes(out)


def test_commands_speak(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    shown = {one["check"]: one["target"] for one in run(capsys, "doctor", str(folder))["findings"]}
    assert (shown["frames"], shown["codebooks"]) == ("delay pattern", BOOKS)
    assert "frame-lookup" in shown["recipes that fit without a draft model"]
    out = tmp_path / "said.wav"
    asked = ("generate", "--model", str(folder), "--prompt", TEXTS[0], "--out", str(out))
    found = run(capsys, *asked, "--max-new-tokens", "10", "--repeats", "1", "--guidance", "3")
    assert (found["recipe"], found["identical_to_plain"]) == ("frame-lookup", True)
    assert os.path.getsize(out) > 44
    assert "temperatures below 1" in fail(capsys, *asked, "--temperature", "0.5")[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["frame-joint", "frame-depth", "frame-coupled", "frame-lookup"])
def test_samples_are_counted(recipe: str) -> None:
    """Tiny models, some of which end after the first step with some of its codes, or with all."""
    found = bench.certify(recipe, modality="frames", seeds=2, samples=500)
    outcomes = {one.name: one.outcome for one in found.checks}
    checks = ("greedy equality", "seeded equality", "frequencies")
    assert {outcomes[f"{check}, end"] for check in checks} <= {"passed", "skipped"}
    assert outcomes["frequencies, end"] == "passed"
