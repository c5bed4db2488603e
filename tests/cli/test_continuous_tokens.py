"""Commands for models that draw continuous tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from mmspec import registry, zoo
from mmspec.cli import main
from tests.cli.running import fail, run
from tests.toys.mar import mar

needs_zoo = pytest.mark.skipif(
    not (zoo.is_present("mar") and zoo.is_present("mar-drafter")),
    reason="the zoo's pair of continuous tokens is not trained yet",
)
SHORT = ("--steps", "4", "--head-steps", "4", "--guidance", "1")


@needs_zoo
def test_a_sheet_of_a_class_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "circles.png"
    asked = ("generate", "--model", "zoo:mar", "--prompt", "a red circle", "--out", str(out))
    found = run(capsys, *asked, *SHORT, "--length", "1", "--grid", "1x2", "--repeats", "1")
    assert Image.open(out).size[0] > 2 * 48
    assert (found["recipe"], found["exact"]) == ("cspd-coupled", True)
    assert found["calls"] == found["stats"]["target_calls"]
    assert found["settings"] == {"steps": 4, "guidance": 1.0, "head_steps": 4, "last_noise": True}
    assert (found["baseline"], found["identical_to_plain"]) == (None, None)
    assert found["calls_plain"] == 4
    assert found["stats"]["num_new_tokens"] == 8


@pytest.mark.exhaustive
@needs_zoo
def test_recipes_are_measured_beside_wider_steps(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("bench", "--model", "zoo:mar", "--prompts", "1", "--repeats", "1", "--pictures", "2")
    found = run(capsys, *asked, *SHORT, "--recipe", "all")
    # the fastest first: which that is on a picture of four steps, the machine decides
    assert {row["recipe"] for row in found["rows"]} == {"plain", "cspd", "cspd-coupled"}
    assert "facts right" in found["rows"][0]["qualities"]
    assert all(row["recipe"].endswith("steps") for row in found["baselines"])


@needs_zoo
def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, message in (
        (("--prompt", "a red digit"), "is not a class of this model"),
        (
            ("--prompt", "red ring", "--guidance-schedule", "steep"),
            "choose one of linear, constant",
        ),
        (("--prompt", "red ring", "--recipe", "sjd"), "recipes for it: cspd"),
    ):
        assert main(["generate", "--model", "zoo:mar", *asked, "--no-compare"]) != 0
        assert message in capsys.readouterr().err


def test_a_folder_of_one_is_known_by_its_configuration(tmp_path: Path) -> None:
    mar().save_pretrained(tmp_path)
    assert registry.find_modality(str(tmp_path)).name == "mar"
    assert registry.find_modality("zoo:mar").name == "mar"


@needs_zoo
def test_a_pickled_autoencoder_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = tmp_path / "mar"
    shutil.copytree(zoo.path("mar"), where)
    (where / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (where / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"")
    drafter = ("--drafter", "zoo:mar-drafter", "--prompt", "1", "--no-compare")
    assert "no autoencoder" in fail(capsys, "generate", "--model", str(where), *drafter)[1]
    assert main(["doctor", str(where)]) == 1
    assert "unpickling runs code" in capsys.readouterr().err
