"""`demos/diffusion.py` on a tiny pipeline: two pictures and a table."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from PIL import Image

from tests.toys.pipelines import pipeline

DEMO = Path(__file__).parents[1] / "demos" / "diffusion.py"


def test_the_demo_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline("pixart").save_pretrained(tmp_path / "pipe")
    demo = runpy.run_path(str(DEMO))
    demo["main"](
        model=str(tmp_path / "pipe"),
        prompt=["a red square", "two blue dots"],
        recipe=["asd", "taylorseer"],
        steps=5,
        out=tmp_path,
    )
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("plain", "asd", "pipeline", "taylorseer", "lossy"))
    sheet = Image.open(tmp_path / "diffusion-pictures.png")
    assert sheet.width == 8 + 4 * 152
    rounds = Image.open(tmp_path / "diffusion-rounds.png")
    assert len(rounds.getcolors(1 << 20) or ()) > 4  # axes, words, and a line per chain
