"""`mmspec train`: libraries that recipes can load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mmspec
from mmspec.cli import main
from mmspec.codes.phrases import Phrases
from tests.toys import image_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("class")
    image_models.llamagen_class().save_pretrained(where)
    return where


def test_phrases_are_drawn_saved_and_loaded(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    asked = ["train", "phrases", "--model", str(folder), "--prompt", "1", "--prompt", "3"]
    asked += ["--pictures", "5", "--batch", "2", "--guidance", "2", "--temperature", "0.5"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    file, side = folder / "phrases.safetensors", image_models.SIDE
    assert found["out"] == str(file)
    assert (found["pictures"], found["rows"]) == (5, 5 * side)
    library = Phrases.load(file)
    assert len(library) == found["phrases"] > 0
    assert sum(found["phrases_by_length"].values()) == len(library)
    fast = mmspec.accelerate(image_models.llamagen_class(), "sjd-pv", phrases=str(file))
    assert fast.generate_images(class_ids=[1], seed=0).stats.fallback is None
    again = tmp_path / "again.safetensors"
    assert main([*asked, "--out", str(again), "--recipe", "coupled", "--drafter", str(folder)]) == 0
    assert Phrases.load(again) == library  # exact, and coupled to the same noise
    assert "sjd-pv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "has no prompts of its own; give --prompt"),
        (("--prompt", "1", "--recipe", "zipar"), "recipe 'zipar' is lossy"),
        (("--prompt", "a dog"), "this model generates classes"),
        (("--prompt", "1", "--out", "."), "is a folder; give --out a file in it"),
        (("--prompt", "1", "--out", "nowhere/x.safetensors"), "there is no folder nowhere"),
    ],
    ids=["no prompt", "lossy", "words", "folder", "nowhere"],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, more: tuple[str, ...], said: str
) -> None:
    assert main(["train", "phrases", "--model", str(folder), "--pictures", "1", *more]) == 1
    assert said in capsys.readouterr().err
