"""`demos/asr.py` on a tiny model: transcripts, a table and spectrograms."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from PIL import Image

from mmspec.modalities.common.sound import write
from tests.modalities.speech.recognisers import RATE_HZ, noise, processor, whisper

DEMO = Path(__file__).parents[2] / "demos" / "asr.py"


def test_the_demo_transcribes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whisper().save_pretrained(tmp_path / "model")
    processor().save_pretrained(tmp_path / "model")
    write(tmp_path / "noise.wav", noise(1.0), RATE_HZ)
    demo = runpy.run_path(str(DEMO))
    demo["main"](
        model=str(tmp_path / "model"),
        drafter=None,
        audio=[tmp_path / "noise.wav"],
        recipe=["prompt-lookup"],
        count=1,
        out=tmp_path,
    )
    printed = capsys.readouterr().out
    assert "wrote what plain decoding wrote: yes" in printed
    assert "speed-up over plain" in printed
    assert Image.open(tmp_path / "asr-prompt-lookup.png").size[0] > 400
    with pytest.raises(SystemExit, match="there is no audio file"):
        demo["main"](
            model=str(tmp_path / "model"),
            drafter=None,
            audio=[tmp_path / "nowhere.wav"],
            recipe=["prompt-lookup"],
            count=1,
            out=tmp_path,
        )
