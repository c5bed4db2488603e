"""`demos/tts.py` on a tiny model: sounds, spectrograms and a table."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from PIL import Image

from tests.toys import voices

DEMO = Path(__file__).parents[1] / "demos" / "tts.py"


@pytest.mark.promise
def test_the_demo_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, small = voices.saved(tmp_path / "model"), tmp_path / "small"
    voices.speaker(seed=1, layers=1).save_pretrained(small)
    voices.words().save_pretrained(small)
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
