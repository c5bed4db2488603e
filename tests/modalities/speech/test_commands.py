"""Recognisers on the command line: a folder, a sound, a transcript and a picture."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image

from mmspec.cli import main
from mmspec.modalities.common.sound import write
from tests.modalities.speech.recognisers import RATE_HZ, noise, processor, tokenizer, whisper


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Whisper, a decoder for it, and sounds."""
    folder = tmp_path_factory.mktemp("asr")
    whisper().save_pretrained(folder / "model")
    processor().save_pretrained(folder / "model")
    small = whisper(1, 1)
    alone = transformers.WhisperForCausalLM(copy.deepcopy(small.config))
    alone.model.decoder.load_state_dict(small.model.decoder.state_dict())
    alone.save_pretrained(folder / "small")
    tokenizer().save_pretrained(folder / "small")
    write(folder / "short.wav", noise(1.0), RATE_HZ)
    write(folder / "long.wav", noise(3.0), RATE_HZ)
    return {one.stem: str(one) for one in folder.iterdir()}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_writes_what_it_hears_and_draws_its_rounds(
    there: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "rounds.png"
    asked = ["generate", "--model", there["model"], "--audio", there["short"], "--language", "en"]
    found = run(capsys, *asked, "--out", str(picture), "--repeats", "1")
    assert found["text"]
    assert found["identical_to_generate"] is True
    assert found["extras"]["real-time factor"] > 0
    assert Image.open(picture).size[0] > 400
    long = [*asked[:3], "--audio", there["long"], "--no-compare"]
    assert run(capsys, *long)["text"]
    drafted = ["--drafter", there["small"], "--recipe", "whisper-assisted", "--no-compare"]
    again = run(capsys, *asked, *drafted)
    assert (again["text"], again["stats"]["drafter_saw"]) == (found["text"], "encoder")
    assert again["stats"]["prefill_steps"] > 0  # Whisper reads its prompt with the first draft


def test_doctor_knows_a_pair(there: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "doctor", there["model"], there["small"])
    assert (found["refused"], found["modality"]) == (False, "asr")
    fit = next(one for one in found["findings"] if one["check"].startswith("recipes that fit"))
    assert "whisper-assisted" in fit["target"]


ERRORS = {
    "nothing to hear": ((), "give --audio a file"),
    "no such sound": (("--audio", "nowhere.wav"), "there is no audio file nowhere.wav"),
    "no such task": (("--audio", "x.wav", "--task", "sing"), "task='sing' is not known"),
    "no such language": (("--language", "klingon"), "klingon"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line(
    case: str, there: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = ERRORS[case]
    if case == "no such language":
        arguments = ("--audio", there["short"], *arguments)
    capsys.readouterr()
    assert main(["generate", "--model", there["model"], "--no-compare", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_bench_counts_word_errors(
    there: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("bench", "--model", there["model"], "--prompts", "1", "--repeats", "1", "--no-peers")
    found = run(capsys, *asked, "--max-new-tokens", "4", "--no-efficiency")
    row = next(one for one in found["rows"] if one["recipe"] == "prompt-lookup")
    assert row["qualities"]["word error rate"]["value"] > 0
    assert row["identical"] == 1
    calls = {one["recipe"]: one["calls"] for one in (*found["rows"], *found["baselines"])}
    assert calls["plain"] == calls["generate"] == 6  # three after the prefill of each window
    assert {"real-time factor", "calls saved"} <= set(row["extras"])
