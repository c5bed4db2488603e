"""`demos/tts.py` on a tiny model: sounds, spectrograms and a table."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from PIL import Image

from tests.toys import speech_models

DEMO = Path(__file__).parents[2] / "demos" / "tts.py"


@pytest.mark.exhaustive
def test_the_demo_writes_speech(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, small = speech_models.save_checkpoint(tmp_path / "model"), tmp_path / "small"
    speech_models.speaker(seed=1, layers=1).save_pretrained(small)
    speech_models.words().save_pretrained(small)
    demo = runpy.run_path(str(DEMO))
    demo["main"](
        model=str(model),
        drafter=str(small),
        prompt=["a red circle", "blue"],
        recipe=["coupled", "ssd"],
        voice="ben",
        sentences=1,
        temperature=1.0,
        seed=9,
        out=tmp_path,
    )
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("plain", "coupled", "ssd", "exact", "lossy", " ms"))
    for name in ("plain", "coupled", "ssd"):
        assert Image.open(tmp_path / f"tts-{name}.png").width > 1000
        assert (tmp_path / f"tts-{name}-1.wav").stat().st_size >= 44
    same = [(tmp_path / f"tts-{name}-0.wav").read_bytes() for name in ("plain", "coupled")]
    assert same[0] == same[1]
