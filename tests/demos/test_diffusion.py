"""`demos/diffusion.py` on a tiny pipeline: two pictures and a table."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.toys.pipelines import pipeline

DEMO = Path(__file__).parents[2] / "demos" / "diffusion.py"


def run(**settings: Any) -> None:
    runpy.run_path(str(DEMO))["main"](**settings)


def test_the_demo_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate(("pipe", "small")):
        pipeline("pixart", seed).save_pretrained(tmp_path / name)
    run(
        model=str(tmp_path / "pipe"),
        drafter=str(tmp_path / "small"),
        prompt=["a red square", "two blue dots"],
        recipe=["asd", "accelerated-diffusion", "taylorseer"],
        steps=5,
        out=tmp_path,
    )
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("plain", "asd", "pipeline", "taylorseer", "PSNR"))
    sheet = Image.open(tmp_path / "diffusion-pictures.png")
    assert sheet.width == 8 + 5 * 152
    rounds = Image.open(tmp_path / "diffusion-rounds.png")
    assert len(rounds.getcolors(1 << 20) or ()) > 5  # axes, words, and a line per chain


def test_without_a_drafter_the_demo_leaves_recipes_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline("pixart").save_pretrained(tmp_path / "pipe")
    recipe = ["accelerated-diffusion", "taylorseer"]
    run(model=str(tmp_path / "pipe"), prompt=["x"], recipe=recipe, steps=3, out=tmp_path)
    printed = capsys.readouterr().out
    assert "without accelerated-diffusion: recipe" in printed
    assert "needs a draft" in printed
    assert "plain" in printed


def test_without_weights_the_demo_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.zoo.is_present", lambda name: False)
    with pytest.raises(SystemExit, match="train it with `mmspec zoo train diffusion`"):
        run()
