"""Commands for models that draw with picture tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image, ImageChops
from PIL.GifImagePlugin import GifImageFile

from mmspec import zoo
from mmspec.cli import main
from mmspec.modalities.image.round_maps import (
    CELL,
    GREY,
    LINE,
    RAMP,
    render_frames,
    render_steps_map,
    round_colour,
)
from tests import toys
from tests.cli.running import fail, run
from tests.toys import image_models, processors

needs_zoo = pytest.mark.skipif(
    not (zoo.is_present("image") and zoo.is_present("image-drafter")),
    reason="the zoo's image models are not trained yet",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Janus and its draft model, a LlamaGen by class and by caption, a text model."""
    root = tmp_path_factory.mktemp("image_models")
    found = processors.save_pair(root)
    for name, model in (
        ("class", image_models.llamagen_class()),
        ("caption", image_models.llamagen_caption()),
        ("text", toys.model("llama")),
    ):
        model.save_pretrained(root / name)
        found[name] = str(root / name)
    return found


def test_a_picture_and_its_map_are_drawn(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    out, rounds = tmp_path / "circle.png", tmp_path / "map.png"
    asked: tuple[str, ...] = ("generate", "--model", folders["janus"], "--prompt", "a red circle")
    asked += ("--out", str(out), "--steps-map", str(rounds), "--seed", "3")
    how = ("--recipe", "sjd", "--guidance", "2", "--codes", "4x4", "--repeats", "1")
    found = run(capsys, *asked, *how)
    assert Image.open(out).size == (8, 8)
    assert (found["recipe"], found["exact"]) == ("sjd", True)
    assert found["calls"] == found["stats"]["target_calls"]
    assert found["calls_plain"] == 15
    assert found["fewer_calls"] == 15 / found["calls"]
    assert found["stats"]["target_calls"] == max(map(max, found["rounds"][0]))
    assert set(found["seconds_per_request"]) == {"generate", "plain", "sjd"}
    assert found["speedup_end_to_end"] > 0
    assert found["files"] == [str(out), str(rounds)]
    shown = Image.open(rounds).convert("RGB")
    assert shown.getpixel((12, 12 + LINE)) == RAMP[0]
    assert shown.height > 4 * CELL
    assert main([*asked, "--no-compare"]) == 0  # another recipe by default, and one for people
    printed = capsys.readouterr().out
    assert "tokens per target call" in printed
    assert "mc-sjd-gumbel (exact)" in printed


def test_a_sheet_is_one_batch_and_begins_with_the_single_picture(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    out, rounds = tmp_path / "sheet.png", tmp_path / "map.png"
    asked: tuple[str, ...] = ("generate", "--model", folders["janus"], "--prompt", "a red circle")
    asked += ("--no-compare", "--out", str(out), "--steps-map", str(rounds))
    one = run(capsys, *asked)
    single = [Image.open(file).copy() for file in (out, rounds)]
    many = run(capsys, *asked, "--grid", "2x3")
    assert len(many["codes"]) == len(many["rounds"]) == 6
    assert many["codes"][0] == one["codes"][0]
    assert many["codes"][1] != one["codes"][0]
    assert Image.open(out).size == (16 * (3 * (8 + 2) + 2), 16 * (2 * (8 + 2) + 2))  # enlarged
    first = single[0].convert("RGB").resize((128, 128), Image.Resampling.NEAREST)
    assert Image.open(out).crop((32, 32, 160, 160)).tobytes() == first.tobytes()
    assert Image.open(rounds).width == 3 * (single[1].width + 2) + 2


def test_classes_are_drawn_by_number(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    common = ("--out", str(tmp_path / "x.png"), "--no-compare", "--temperature", "0")
    found = run(capsys, "generate", "--model", folders["class"], "--prompt", "3", *common)
    again = run(capsys, "generate", "--model", folders["class"], "--prompt", "1", *common)
    assert found["codes"] != again["codes"]
    assert found["steps_map"] is None


@pytest.mark.exhaustive
def test_recipes_are_benchmarked_side_by_side(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    asked: tuple[str, ...] = ("bench", "--model", folders["janus"], "--repeats", "1")
    asked += ("--drafter", folders["janus-drafter"], "--prompt", "a red circle", "--batch", "2")
    asked += ("--recipe", "sjd", "--recipe", "cool-sd")
    found = run(capsys, *asked)
    assert [row["recipe"] for row in found["rows"]] == ["plain", "sjd", "cool-sd"]
    assert [row["drafter"] for row in found["rows"]] == [None, None, folders["janus-drafter"]]
    assert [row["recipe"] for row in found["baselines"]] == ["generate"]
    assert (found["judged"], found["environment"]["batch"]) == (1, 2)
    assert main(list(asked)) == 0
    printed = capsys.readouterr().out
    assert "fewer" in printed
    assert "log likelihood" in printed


@pytest.mark.exhaustive
def test_a_recipe_is_certified_on_a_model_that_draws(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    asked = ("certify", "sjd", "--modality", "image", "--model", folders["janus"])
    found = run(capsys, *asked, "--samples", "500", "--seeds", "2")
    assert found["verdict"] == "exact"
    greedy = next(check for check in found["checks"] if check["name"] == "greedy equality")
    assert greedy["detail"].startswith("1 of 1 outputs equal those of generate()")


@pytest.mark.exhaustive
def test_options_are_set(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    asked: tuple[str, ...] = ("bench", "sweep", "--model", folders["janus"], "--repeats", "1")
    asked += ("--prompt", "a red circle", "--recipe", "gsd", "--out", str(tmp_path / "gsd.csv"))
    found = run(capsys, *asked)
    assert [point["value"] for point in found["points"]] == [0, 3, 10, 25, 50]
    assert len((tmp_path / "gsd.csv").read_text().splitlines()) == 6
    assert main(list(asked)) == 0
    assert "tiny TV" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("generate", "--prompt", "x", "--modality", "image", "--model", "TEXT"),
            "generates no image tokens",
        ),
        (("generate", "--prompt", " ", "--model", "JANUS"), "the prompt is empty"),
        (("generate", "--prompt", "x", "--model", "CLASS"), "give --prompt a number, not 'x'"),
        (
            ("generate", "--prompt", "x", "--model", "CAPTION"),
            "conditioned on caption, caption_mask",
        ),
        (
            ("generate", "--prompt", "a", "--model", "JANUS", "--codes", "9"),
            "--codes 9 is not a size",
        ),
        (("generate", "--prompt", "a", "--model", "JANUS", "--codes", "3x5"), "4 x 4 codes"),
        (
            ("generate", "--prompt", "a", "--model", "JANUS", "--grid", "0x2"),
            "--grid 0x2 is not a s",
        ),
        (("generate", "--prompt", "a", "--model", "JANUS", "--grid", "9x9"), "give --codes 9x9"),
        (
            ("generate", "--prompt", "a", "--model", "JANUS", "--steps-map", "no/x.png"),
            "there is no folder no",
        ),
        (("generate", "--prompt", "a", "--model", "JANUS", "--recipe", "asd"), "decodes latents"),
        (("bench", "--model", "JANUS", "--recipe", "lantern"), "a draft model or feature head"),
        (
            ("bench", "--model", "JANUS", "--recipe", "sjd", "--drafter", "SMALL"),
            "takes no draft model",
        ),
        (("generate", "--prompt", "a", "--recipe", "coupled", "--recipe", "block"), "give it once"),
        (("generate", "--prompt", "a", "--model", "JANUS", "--out", "x.mp3"), "choose one of .png"),
        (("generate", "--prompt", "a", "--model", "JANUS", "--out", "tests"), "is a folder"),
        (
            ("generate", "--prompt", "a", "--model", "JANUS", "--animation", "x.png"),
            "--animation x.png: files of type .png cannot be written; choose one of .gif, .webp",
        ),
        (
            ("generate", "--prompt", "a", "--model", "JANUS", "--steps-map", "./mmspec.png"),
            "--out and --steps-map both write mmspec.png; give each its own file",
        ),
        (
            ("bench", "compressors", "--plot", "x.png", "--picture", "./x.png"),
            "--plot and --picture both write x.png",
        ),
        (("bench", "sweep", "--model", "JANUS", "--plot", "x.txt"), "choose one of .svg"),
        (("bench", "sweep", "--model", "JANUS", "--recipe", "sjd"), "sjd: no parameter to sweep"),
        (
            ("generate", "--prompt", "a", "--modality", "image", "--model", "zoo:llava"),
            "is of modality vlm",
        ),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    folders: dict[str, str],
) -> None:
    names = {"JANUS": folders["janus"], "SMALL": folders["janus-drafter"]}
    names |= {name.upper(): folders[name] for name in ("class", "caption", "text")}
    assert message in fail(capsys, *(names.get(word, word) for word in arguments))[1]


def test_the_map_goes_from_dark_to_light() -> None:
    assert (round_colour(0, 9), round_colour(9, 9), round_colour(0, 0)) == (
        RAMP[0],
        RAMP[-1],
        RAMP[0],
    )
    assert len({round_colour(turn, 80) for turn in range(81)}) == 81
    shown = render_steps_map([[0, 1, 2]], "sjd")
    assert shown.width > 3 * CELL
    other = render_steps_map([[0, 1, 2]], "mc-sjd")
    box = ImageChops.difference(shown, other).getbbox()
    assert box is not None
    assert box[3] < shown.height - CELL  # the title alone, above the cells


def test_an_animation_shows_each_cell_from_its_round_on() -> None:
    picture = Image.new("RGB", (6, 4), (255, 0, 0))
    shown = render_frames(picture, [[0, 2, 2], [1, 0, 2]], 2)
    assert [one.getpixel((0, 0)) for one in shown] == [(255, 0, 0)] * 3
    assert [one.getpixel((1, 3)) for one in shown] == [GREY, (255, 0, 0), (255, 0, 0)]
    assert [one.getpixel((5, 0)) for one in shown] == [GREY, GREY, (255, 0, 0)]
    assert shown[-1].tobytes() == picture.tobytes()


def test_a_sheet_moves(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    out, moving = tmp_path / "sheet.png", tmp_path / "moving.gif"
    asked = ("generate", "--model", folders["janus"], "--prompt", "a red circle", "--no-compare")
    found = run(capsys, *asked, "--out", str(out), "--animation", str(moving), "--grid", "1x2")
    assert found["files"] == [str(out), str(moving)]
    last = max(turn for one in found["rounds"] for row in one for turn in row)
    shown = GifImageFile(moving)
    with shown:
        assert 1 < shown.n_frames <= last + 1  # GIF joins frames that are the same
        assert shown.size == (24 * 22, 24 * 12)  # enlarged, to at least 512
        assert Image.open(out).size == shown.size


@needs_zoo
def test_the_zoo_draws_what_was_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from mmspec.zoo.prompts import prompts
    from mmspec.zoo.scene_parser import score_picture

    out, right, total = tmp_path / "scene.png", 0, 0
    for wanted in prompts(2):
        asked = ("generate", "--modality", "image", "--out", str(out), "--no-compare")
        found = run(capsys, *asked, "--prompt", wanted.text)
        assert found["stats"]["target_calls"] < found["stats"]["num_new_tokens"]
        good, asked_for = score_picture(wanted.scene, Image.open(out))
        right, total = right + good, total + asked_for
    assert right >= total / 2


def test_a_plot_without_its_library_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmspec.cli.models.find_spec", lambda name: None)
    asked = ("bench", "sweep", "--model", folders["janus"], "--prompt", "x", "--plot", "x.svg")
    assert "install mmspec[plots]" in fail(capsys, *asked)[1]
