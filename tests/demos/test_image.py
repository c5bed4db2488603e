"""`demos/image.py` on a tiny model: two pictures and a table."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from PIL import Image

from mmspec.modalities.common.sheets import MARGIN, SIDE
from mmspec.tracing.palette import LEAST_WIDTH
from tests.toys import processors

DEMO = Path(__file__).parents[2] / "demos" / "image.py"


@pytest.mark.exhaustive
def test_the_demo_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = processors.save_pair(tmp_path)
    demo = runpy.run_path(str(DEMO))
    demo["main"](
        model=folders["janus"],
        drafter=folders["janus-drafter"],
        prompt=None,
        recipe=["sjd", "lantern"],
        pictures=2,
        guidance=None,
        temperature=None,
        seed=0,
        out=tmp_path,
    )
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("plain", "sjd", "lantern", "lossy", " of "))
    sheet = Image.open(tmp_path / "image-pictures.png")
    assert sheet.width >= max(LEAST_WIDTH, MARGIN + 3 * (SIDE + MARGIN))
    assert Image.open(tmp_path / "image-rounds.png").height > 4 * 36
