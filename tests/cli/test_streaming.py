"""`mmspec generate --stream`: a file that is valid at any moment, samples on stdout, words."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmspec
from mmspec.cli import main
from mmspec.modalities.common.sound import WavWriter, encode_pcm
from tests.cli.running import fail
from tests.toys import speech_models

ASKED = ("--prompt", "a red circle", "--voice", "ben", "--max-new-tokens", "40", "--seed", "9")
REQUEST = {"voice": "ben", "max_new_tokens": 40, "seed": 9}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(speech_models.save_checkpoint(tmp_path_factory.mktemp("speaker")))


def check_whole(data: bytes, model: str) -> None:
    """The samples of the whole decode, up to rounding to integers."""
    output: Any = mmspec.accelerate(model).synthesize("a red circle", **REQUEST)
    mine, whole = (
        np.frombuffer(one, "<i2").astype(int) for one in (data, encode_pcm(output.waveform))
    )
    assert len(mine) == len(whole) > 100
    assert abs(mine - whole).max() <= 1


def read(path: Path) -> bytes:
    with wave.open(str(path)) as file:
        assert path.stat().st_size == 44 + 2 * file.getnframes()
        return bytes(file.readframes(file.getnframes()))


def test_a_wav_file_grows_and_is_always_valid(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, sizes, write = tmp_path / "said.wav", list[int](), WavWriter.write

    def watch(self: WavWriter, samples: Any) -> None:
        write(self, samples)
        sizes.append(len(read(out)))

    monkeypatch.setattr(WavWriter, "write", watch)
    assert main(["generate", "--model", model, *ASKED, "--stream", "--out", str(out)]) == 0
    assert sizes == sorted(sizes)
    assert len({*sizes}) > 5
    check_whole(read(out), model)
    printed = capsys.readouterr()
    assert not printed.out
    assert "first sound in round " in printed.err
    assert "real-time factor " in printed.err
    assert "prompt-lookup (exact)" in printed.err


def test_an_interrupt_leaves_what_was_verified(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, write = tmp_path / "said.wav", WavWriter.write

    def stop(self: WavWriter, samples: Any) -> None:
        write(self, samples)
        if len(read(out)) > 100:
            raise KeyboardInterrupt

    monkeypatch.setattr(WavWriter, "write", stop)
    assert main(["generate", "--model", model, *ASKED, "--stream", "--out", str(out)]) == 130
    assert f"interrupted; {out} has the first 0." in capsys.readouterr().err
    assert len(read(out)) > 100


def test_samples_are_written_to_stdout(
    capsysbinary: pytest.CaptureFixture[bytes], model: str
) -> None:
    assert main(["generate", "--model", model, *ASKED, "--stream", "--out", "-"]) == 0
    printed = capsysbinary.readouterr()
    check_whole(printed.out, model)
    assert b" s of sound in " in printed.err


def test_the_codec_is_an_option(capsysbinary: pytest.CaptureFixture[bytes], model: str) -> None:
    speech_models.codec().save_pretrained(Path(model) / "other")
    asked = ["generate", "--model", model, *ASKED, "--stream", "--out", "-"]
    assert main([*asked, "--codec", "other"]) == 0
    check_whole(capsysbinary.readouterr().out, model)
    assert main([*asked, "--codec", "none"]) == 1


def test_words_are_printed_as_they_are_verified(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--model", "zoo:llava", "--image", "zoo:scene", "--max-new-tokens", "20"]
    asked += ["--prompt", "describe the picture"]
    assert main([*asked, "--stream"]) == 0
    printed = capsys.readouterr()
    assert main([*asked, "--no-compare"]) == 0
    text = capsys.readouterr().out.splitlines()[0]
    assert printed.out.strip() == text.strip()
    assert "first token after " in printed.err
    assert " 20 tokens in " in printed.err


def test_what_cannot_be_streamed_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    asked = ("generate", "--model", model, *ASKED)
    for more, message in (
        (("--stream", "--json"), "drop --json"),
        (("--stream", "--quiet"), "drop --quiet"),
        (("--stream", "--repeats", "5"), "drop --repeats"),
        (("--stream", "--compare"), "drop --compare"),
        (("--no-compare", "--repeats", "5"), "--no-compare leaves it out"),
        (("--stream", "--rounds", str(tmp_path / "a.png")), "drop --rounds"),
        (("--out", "-"), "add --stream"),
        (("--stream", "--out", str(tmp_path / "a.mp3")), "choose one of .wav"),
    ):
        assert message in fail(capsys, *asked, *more)[1]
    image = ("generate", "--model", "zoo:image", "--prompt", "a red ring", "--stream")
    assert "zoo:image generates neither" in fail(capsys, *image)[1]


def test_a_refused_request_leaves_an_older_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    out = tmp_path / "said.wav"
    out.write_bytes(b"older")
    given = ("generate", "--model", model, *ASKED, "--stream", "--out", str(out))
    assert "nobody" in fail(capsys, *given, "--voice", "nobody")[1]
    assert out.read_bytes() == b"older"
