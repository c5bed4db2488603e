"""`demos/video.py` on the bundled pictures' model: a table, and what compressors leave."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from PIL import Image

from mmspec import zoo
from mmspec.zoo.scene import sample
from mmspec.zoo.scene_tensors import render_pixels

DEMO = Path(__file__).parents[2] / "demos" / "video.py"


@pytest.mark.exhaustive
@pytest.mark.skipif(not zoo.is_present("qwen2.5-vl"), reason="the zoo is not trained")
def test_the_demo_compares_compressors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at in range(4):
        Image.fromarray(render_pixels(sample(at), 48)).save(tmp_path / f"{at}.png")
    runpy.run_path(str(DEMO))["main"](
        model="zoo:qwen2.5-vl",
        drafter=None,
        video=str(tmp_path),
        frames=4,
        prompt="what is there?",
        recipe="coupled",
        compressor=["identity", "average-pool", "hide-all"],
        max_new_tokens=12,
        repeats=1,
        out=tmp_path,
    )
    printed = capsys.readouterr().out
    names = ("plain", "coupled", "identity", "average-pool", "hide-all")
    rows = {line.split()[0]: line for line in printed.splitlines() if "the same" in line}
    assert tuple(rows) == names
    kept = ["72 of 72", "18 of 72", "0 of 72"]
    assert [part in rows[name] for name, part in zip(names[2:], kept, strict=True)] == [True] * 3
    assert Image.open(tmp_path / "video-kept.png").width > 150
