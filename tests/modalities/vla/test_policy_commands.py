"""Policies on the command line: an episode as a picture that moves, a race, a certificate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mmspec
from mmspec.cli import main
from mmspec.cli.models import select
from mmspec.cli.options import ModelOptions
from tests.modalities.vla.policies import policy, processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("policy")
    policy().save_pretrained(made)
    processor().save_pretrained(made)
    return str(made)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_runs_an_episode(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown, plot = tmp_path / "episode.gif", tmp_path / "acceptance.png"
    asked = ["generate", "--model", folder, "--recipe", "prompt-lookup", "--steps", "3"]
    written = ["--out", str(shown), "--acceptance", str(plot)]
    found = run(capsys, *asked, *written, "--seed", "7", "--repeats", "1")
    assert (len(found["actions"]), len(found["actions"][0])) == (3, 7)
    assert found["instruction"].startswith("reach the ")
    assert found["identical_to_plain"] is True
    assert found["identical_to_generate"] is True
    assert found["stats"]["steps"] == 3
    assert found["calls"] * 3 == found["stats"]["target_calls"]  # calls are of an action
    assert found["extras"]["steps"] == 3
    moving: Any = Image.open(shown)
    assert (
        1 < moving.n_frames <= 4
    )  # what looks alike is one frame, by Pillow; speeds are drawn, too
    assert Image.open(plot).width > 400
    told = ["--instruction", "reach the red circle", "--no-compare", "--out", str(shown)]
    other = run(capsys, *asked, *told, "--seed", "7")
    assert other["instruction"] == "reach the red circle"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--world", "moon"), "'moon'"),
        (("--deadline-ms", "0"), "deadline_ms"),
        (("--instruction", "a", "--prompt", "b"), "one instruction"),
        (("--unnorm-key", "bridge"), "bridge"),
        (("--out", "episode.wav"), ".wav"),
    ],
)
def test_bad_options_are_one_error(
    folder: str, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], words: str
) -> None:
    asked = ["generate", "--model", folder, "--recipe", "prompt-lookup", "--no-compare", *more]
    assert main(asked) != 0
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_a_recipe_of_picture_codes_is_refused_before_anything_is_asked(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (folder, "zoo:vla"):
        assert main(["generate", "--model", name, "--recipe", "mulo-sd"]) != 0
        said = capsys.readouterr().err
        assert "'mulo-sd' needs a codebook" in said
        assert "hold-last" in said
        assert "draft model" not in said
    with pytest.raises(ValueError, match="OpenVLAForActionPrediction has none"):
        mmspec.accelerate(policy(), "mulo-sd")


def test_what_is_usual_for_the_policy_of_the_zoo() -> None:
    """An exact recipe that pays; a head only where one is given."""
    assert select(ModelOptions(command="generate", model="zoo:vla")).recipes == ("hold-last",)
    given = ModelOptions(command="generate", model="zoo:vla", drafter="zoo:vla-drafter")
    assert select(given).recipes == ("eagle-2",)


def test_doctor_knows_a_policy(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "doctor", folder)
    assert (found["refused"], found["modality"]) == (False, "vla")
