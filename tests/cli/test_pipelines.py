"""Commands for pipelines that draw: a picture, a benchmark, a certificate, one line per error."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from mmspec import zoo
from mmspec.cli import main
from tests.cli.running import fail, run
from tests.toys.pipelines import pipeline

needs_zoo = pytest.mark.skipif(
    not (zoo.is_present("diffusion") and zoo.is_present("diffusion-drafter")),
    reason="the zoo's diffusion pipeline is not trained yet",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A text-to-image pipeline, a class-conditional and an unconditional one."""
    root = tmp_path_factory.mktemp("pipelines")
    for name in ("sd", "dit", "ddpm"):
        pipeline(name).save_pretrained(root / name)
    return {path.name: str(path) for path in root.iterdir()}


def test_a_picture_is_drawn(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "square.png"
    asked: tuple[str, ...] = (
        "generate",
        "--modality",
        "diffusion",
        "--model",
        folders["sd"],
        "--seed",
        "3",
    )
    asked += ("--prompt", "a red square", "--steps", "6", "--out", str(out))
    found = run(capsys, *asked, "--recipe", "asd", "--window", "3", "--repeats", "1")
    assert Image.open(out).size == (8, 8)
    assert (found["recipe"], found["exact"], found["calls_plain"]) == ("asd", True, 6)
    assert found["stats"]["num_new_tokens"] == 6
    assert found["stats"]["target_calls"] == found["calls"]
    assert found["seconds_per_request"].keys() == {"pipeline", "plain", "asd"}
    first = out.read_bytes()
    assert main([*asked, "--recipe", "asd", "--window", "3", "--no-compare"]) == 0
    assert out.read_bytes() == first  # a seed is a picture
    assert "acceptance rate of drafts" in capsys.readouterr().out


def test_pictures_are_drawn_by_class_or_by_nothing(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    common = ("--steps", "4", "--out", str(tmp_path / "x.png"), "--no-compare")
    found = run(
        capsys,
        *("generate", "--model", folders["dit"], "--prompt", "3", "--recipe", "taylorseer"),
        *common,
    )
    assert found["exact"] is False
    stats = found["stats"]
    assert stats["target_calls"] + stats["num_accepted_draft_tokens"] == 4
    found = run(capsys, "generate", "--model", folders["ddpm"], "--prompt", "any", *common)
    assert found["recipe"] == "accelerated-diffusion-carried"
    assert "calls" not in found


def test_options_of_a_recipe_are_set(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    asked = ["generate", "--prompt", "3", "--steps", "6", "--no-compare", "--model", folders["dit"]]
    asked += ["--out", str(tmp_path / "x.png")]
    overrides = ("--set", "interval=2", "--set", "warm_up=1", "--set", "basis=newton")
    found = run(capsys, *asked, "--recipe", "taylorseer", *overrides)
    stats = found["stats"]
    assert (stats["target_calls"], stats["num_accepted_draft_tokens"]) == (3, 3)
    found = run(capsys, *asked, "--recipe", "asd-tree", "--tree", "3,1")
    assert found["stats"]["per_step_drafted"][0] == 6  # 3 states, one below each


@pytest.mark.exhaustive
def test_a_pipeline_is_benchmarked(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    asked: tuple[str, ...] = (
        "bench",
        "--model",
        folders["sd"],
        "--recipe",
        "paradigms",
        "--repeats",
        "1",
    )
    asked += ("--prompt", "a red square", "--steps", "5", "--batch", "2")
    found = run(capsys, *asked)
    plain, mine = found["rows"]
    assert (mine["recipe"], plain["calls"], found["requests"]) == ("paradigms", 5, 1)
    assert plain["network_rows"] == 20  # two pictures, two branches, five steps
    assert {"relative", "psnr"} <= set(mine["qualities"])
    assert set(mine["extras"]["row_costs"]) >= {"1", "32"}
    assert mine["extras"]["per image"]["calls"] == [mine["calls"]] * 2
    assert main(list(asked)) == 0
    out = capsys.readouterr().out
    assert "network rows" in out
    assert "psnr" in out


@pytest.mark.exhaustive
def test_a_recipe_of_latents_is_certified(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "certify", "taylorseer", "--seeds", "1")
    assert (found["verdict"], found["model"]) == ("lossy", "zoo:diffusion")
    assert main(["certify", "taylorseer", "--seeds", "1"]) == 0
    assert "relative distance" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_pipeline_of_the_user_is_certified(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    quick = ("--seeds", "2", "--samples", "500", "--steps", "5", "--prompts", "1")
    found = run(capsys, "certify", "asd", "--model", folders["sd"], *quick)
    assert (found["verdict"], found["model"]) == ("exact", folders["sd"])
    assert found["checks"][-1]["name"] == "this pipeline"
    assert "StableDiffusionPipeline with windows of one" in found["checks"][-1]["detail"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--prompt", "x", "--modality", "music"), "modality 'music' is not known"),
        (("generate", "--prompt", " ", "--model", "SD"), "the prompt is empty"),
        (("generate", "--prompt", "x", "--model", "DIT"), "give --prompt a number, not 'x'"),
        (
            ("generate", "--prompt", "x", "--model", "SD", "--out", "no/where/x.png"),
            "there is no folder no/where",
        ),
        (
            ("generate", "--prompt", "x", "--model", "SD", "--recipe", "coupled"),
            "recipes for it: accelerated-diffusion,",
        ),
        (
            ("generate", "--prompt", "x", "--model", "SD", "--drafter", "DIT"),
            "takes no draft model",
        ),
        (
            ("bench", "--model", "SD", "--recipe", "accelerated-diffusion"),
            "needs a draft pipeline",
        ),
        (
            ("bench", "--modality", "diffusion", "--model", "./nowhere"),
            "there is no model folder ./nowhere",
        ),
        (
            ("bench", "--modality", "diffusion", "--model", "zoo:llava"),
            "zoo:llava is of modality vlm",
        ),
        (("bench", "--model", "SD", "--set", "window"), "gives no value; give NAME=VALUE"),
        (("bench", "--model", "SD", "--set", "windw=3"), "did you mean 'window'"),
        (("bench", "--model", "SD", "--tree", "dynamic"), "must be a list of branching widths"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    folders: dict[str, str],
) -> None:
    names = {"SD": folders["sd"], "DIT": folders["dit"]}
    assert message in fail(capsys, *(names.get(word, word) for word in arguments))[1]


def test_a_zoo_without_weights_says_how_to_train(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmspec.cli.models.zoo.is_present", lambda name: False)
    assert main(["generate", "--modality", "diffusion", "--prompt", "x"]) != 0
    assert "train it with `mmspec zoo train diffusion`" in capsys.readouterr().err


@pytest.mark.exhaustive
@needs_zoo
def test_the_zoo_draws_what_was_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from mmspec.zoo.prompts import prompts
    from mmspec.zoo.scene_parser import score_picture

    out, wanted = tmp_path / "scene.png", prompts(1)[0]
    asked = ("generate", "--modality", "diffusion", "--out", str(out), "--no-compare")
    found = run(capsys, *asked, "--prompt", wanted.text)
    assert found["stats"]["target_calls"] < found["stats"]["num_new_tokens"]
    right, total = score_picture(wanted.scene, Image.open(out))
    assert right >= total / 2


@pytest.mark.exhaustive
@needs_zoo
def test_the_zoo_is_benchmarked_with_its_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("bench", "--recipe", "accelerated-diffusion", "--prompts", "1", "--repeats", "1")
    found = run(capsys, *asked, "--steps", "20")
    mine = found["rows"][1]
    assert mine["drafter"] == "zoo:diffusion-drafter"
    assert "facts right" in mine["qualities"]
    assert mine["calls"] < 20
