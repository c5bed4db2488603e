"""The sheet of all recipes: every row is made by its recipe, and described by its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tools.sampler_sheet import GAP, LABEL, NOISY, PLAIN, SCALE, main


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
