"""Commands for models that draw continuous tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmspec import zoo
from mmspec.cli import main
from mmspec.cli.modality import modality_of
from tests.toys.mar import mar

needs_zoo = pytest.mark.skipif(
    not (zoo.is_present("mar") and zoo.is_present("mar-drafter")),
    reason="the zoo's pair of continuous tokens is not trained yet",
)
SHORT = ("--steps", "4", "--set", "head_steps=4", "--guidance", "1")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """A command's JSON document; it must succeed."""
    capsys.readouterr()
    code = main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


@needs_zoo
def test_a_sheet_of_a_class_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "circles.png"
    asked = ("generate", "--model", "zoo:mar", "--prompt", "a red circle", "--out", str(out))
    found = run(capsys, *asked, *SHORT, "--length", "1", "--grid", "1x2", "--repeats", "1")
    assert Image.open(out).size[0] > 2 * 48
    assert (found["recipe"], found["exact"]) == ("cspd-coupled", True)
    assert found["settings"] == {"steps": 4, "guidance": 1.0, "head_steps": 4, "last_noise": True}
    assert found["calls_plain"] == 4
    assert found["stats"]["num_new_tokens"] == 8


@needs_zoo
def test_recipes_are_measured_beside_wider_steps(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("bench", "--model", "zoo:mar", "--prompts", "1", "--repeats", "1", "--pictures", "2")
    found = run(capsys, *asked, *SHORT)
    names = [row["recipe"] for row in found["rows"]]
    assert names[0] == "plain"
    assert names[-2:] == ["cspd-coupled", "cspd"]
    assert found["pictures"] == 2


@needs_zoo
def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, message in (
        (("--prompt", "a red digit"), "is no class of this model"),
        (("--prompt", "red ring", "--recipe", "sjd"), "for continuous tokens there are cspd"),
    ):
        assert main(["generate", "--model", "zoo:mar", *asked, "--no-compare"]) != 0
        assert message in capsys.readouterr().err


def test_a_folder_of_one_is_known_by_its_configuration(tmp_path: Path) -> None:
    mar().save_pretrained(tmp_path)
    assert modality_of(None, str(tmp_path)) == "image"
    assert modality_of(None, "zoo:mar") == "image"
