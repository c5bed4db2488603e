"""The image model of docs/image-model.md, installed as a package of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.modalities.image import families

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "image-model.md"
FILE, ENTRY, *USES = re.findall(
    r"^```(?:python|toml|py)\n(.*?)^```", GUIDE.read_text(), re.S | re.M
)


@pytest.mark.exhaustive
def test_the_model_of_the_guide_works_from_its_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group, point) = re.findall(r'entry-points\."(.*?)"\]\n(.*)', ENTRY)[0]
    folder = tmp_path / "painter-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: painter\nVersion: 0.1\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\n{point.replace(chr(34), '')}\n")
    (tmp_path / "painter.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    families.image_models.cache_clear()
    try:
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        for code in USES:
            exec(code, names)  # the page's own lines
        assert (tmp_path / "painting.png").is_file()
        names["model"].save_pretrained(tmp_path / "model")
        again: Any = mmspec.accelerate(str(tmp_path / "model"), "mc-sjd-gumbel", modality="image")
        given = {"input_ids": names["prompt"], "temperature": 1.0, "seed": 0}
        assert torch.equal(again.generate_images(**given).sequences, names["out"].sequences)
    finally:
        families.image_models.cache_clear()
        sys.modules.pop("painter", None)


def test_the_guide_stays_short() -> None:
    assert len(GUIDE.read_text().splitlines()) <= 150
    assert len(USES) == 2
