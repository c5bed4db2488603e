"""The sheet of all recipes: every row is made by its recipe, and described by its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import mmspec
from tests.toys.pipelines import pipeline
from tools.sampler_sheet import (
    EXACT,
    GAP,
    LABEL,
    LOSSY,
    NOISY,
    PLAIN,
    SCALE,
    main,
    make_ways,
    sample_all,
)


def test_every_recipe_without_a_draft_model_has_a_row() -> None:
    recipes = [mmspec.recipes.get(name) for name in mmspec.recipes.names("latents")]
    alone = [one for one in recipes if not one.takes_drafter]
    assert {one.name for one in alone if one.exact} == set(EXACT)
    assert {one.name for one in alone} - set(EXACT) == {name.split(",")[0] for name in LOSSY}


@pytest.mark.exhaustive
def test_what_does_not_fit_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = pipeline("sd")
    ways = make_ways(pipe, ["taylorseer", "taylorseer, lite", "speca", "deep-cache"])
    request = {"num_inference_steps": 4, "guidance_scale": 1.0}
    found = sample_all(ways, request, ["a red square"])
    half = f"{PLAIN}, half the steps"
    assert list(found) == [PLAIN, half, "taylorseer, lite", "deep-cache", NOISY]
    said = capsys.readouterr().err
    assert "without taylorseer: UNet2DConditionModel is not a stack" in said
    assert "without speca: " in said
    ways = make_ways(pipeline("sd"), ["deep-cache"])
    repeated = {"deep-cache": ways["deep-cache"], "deep-cache, lite": ways["deep-cache"]}
    assert list(sample_all(repeated, request, ["a red square"])) == ["deep-cache"]


@pytest.mark.slow
def test_a_sheet_has_a_row_for_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sheet.webp"
    chosen = ["--recipe", "asd", "--recipe", "mag-cache"]
    size = ["--steps", "6", "--prompts", "2", "--images", "4"]
    main([str(file), "--model", "zoo:diffusion", *size, *chosen])
    figures = json.loads(capsys.readouterr().out)
    rows = figures["rows"]
    assert list(rows) == [PLAIN, f"{PLAIN}, half the steps", "mag-cache", NOISY, "asd"]
    assert [rows[name]["calls"] for name in (PLAIN, f"{PLAIN}, half the steps")] == [6, 3]
    assert rows["mag-cache"]["of"] == PLAIN
    assert rows["asd"]["of"] == NOISY
    assert rows[PLAIN]["psnr_on_ink"] is None  # equal images
    assert rows[NOISY]["psnr_on_ink"] is None
    assert all(one["distance"] is not None for one in figures["distances"].values())
    assert len(figures["distances"]) == 5
    with Image.open(file) as sheet:
        assert sheet.size == (LABEL + 2 * (SCALE * 48 + GAP), 5 * (SCALE * 48 + GAP))
