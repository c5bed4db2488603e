"""Commands: what they print, one JSON document each, one clear line per error."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from mmspec import accelerate, recipes, registry, zoo
from mmspec.cli import main
from mmspec.cli.bench import _title
from mmspec.cli.models import check_writable, load_models, select
from mmspec.cli.options import PARTS, ModelOptions, flag, parse_pairs, select_settings
from tests.cli.running import fail, run
from tests.covering import exhaustive
from tests.forks import run_forked
from tests.toys.folders import drop, text_pair
from tools.zoo.diffusion import models as diffusion_models
from tools.zoo.image import models as image_models
from tools.zoo.mar import models as mar_models

HAS_ZOO = all(zoo.is_present(name) for name in zoo.names())
needs_zoo = pytest.mark.skipif(not HAS_ZOO, reason="the zoo is not trained yet")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small random models: a text pair, one of another vocabulary, a LLaVA with its drafter."""
    from tools.zoo.vlm.architecture import BLIND, SIGHTED
    from tools.zoo.vlm.families import FAMILIES
    from tools.zoo.vlm.train import save

    root = tmp_path_factory.mktemp("models")
    text_pair(root)
    family = FAMILIES["llava"]
    processor = family.build_processor()
    for name, shape in (("vlm", SIGHTED), ("vlm-drafter", BLIND)):
        model = family.build(shape, processor.tokenizer)
        save(model, processor, root / name, sees=name == "vlm")
    return {path.name: str(path) for path in root.iterdir()}


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run(capsys, "recipes")
    assert [row["name"] for row in listed] == list(recipes.names())
    assert all(row["summary"] and row["modality"] and len(row) == 13 for row in listed)
    drawn = run(capsys, "recipes", "--modality", "mar")
    assert {row["decodes"] for row in drawn} == {"patches"}
    assert {row["name"] for row in drawn} == set(recipes.names("patches"))


def test_the_markdown_table_has_a_row_per_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--markdown"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 2 + len(recipes.names())
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "show", name)
    assert found["name"] == name
    assert len(found["parts"]) == 5
    assert main(["show", name]) == 0
    assert found["description"].splitlines()[0] in capsys.readouterr().out


def test_a_text_model_continues(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    found = run(
        capsys,
        *("generate", "--model", folders["text"], "--drafter", folders["text-drafter"]),
        *("--prompt", "w5 w6 w7", "--max-new-tokens", "8", "--repeats", "1"),
    )
    assert found["recipe"] == "coupled"
    assert found["identical_to_generate"] is True
    assert found["speedup_end_to_end"] > 0
    assert found["calls"] == found["stats"]["target_calls"]
    assert (found["advice"] is None) == (found["speedup_end_to_end"] > 1)
    assert found["stats"]["num_new_tokens"] == len(found["tokens"]) == 8


def test_a_picture_is_described(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    asked: tuple[str, ...] = ("generate", "--model", folders["vlm"], "--image", "zoo:scene")
    asked += ("--prompt", "describe the picture", "--max-new-tokens", "6")
    found = run(capsys, *asked, "--no-compare")
    assert found["recipe"] == "prompt-lookup"
    assert "speedup_end_to_end" not in found
    found = run(
        capsys,
        *(*asked, "--recipe", "spd-mllm", "--drafter", folders["vlm-drafter"]),
        *("--temperature", "1", "--seed", "3", "--repeats", "1"),
    )
    assert found["identical_to_plain"] is True
    assert found["stats"]["drafter_saw"] == "nothing"
    assert main([*asked, "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert "speed-up over generate" in out
    assert "identical to generate" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "copled"), "did you mean 'coupled'?"),
        (("generate",), "the prompt is empty; give --prompt"),
        (("generate", "--prompt", "x", "--prompt", "y"), "--prompt is given 2 times"),
        (("generate", "--image", "a", "--prompt", "x", "--image", "b"), "--image is given 2 times"),
        (("bench", "--growth", "--image", "x"), "--growth ignores --image; drop one"),
        (("bench", "--batch", "1", "views"), "--batch is given before views"),
        (("generate", "--prompt", "x", "--model", "zoo:nope"), "not in the zoo"),
        (("generate", "--prompt", "x", "--model", "./nowhere"), "there is no model folder"),
        (("generate", "--prompt", "x", "--model", "TEXT", "--recipe", "nope"), "no recipe 'nope'"),
        (("generate", "--prompt", " ", "--model", "TEXT"), "the prompt is empty"),
        (
            ("generate", "--prompt", "x", "--model", "TEXT", "--image", "zoo:scene"),
            "takes no image",
        ),
        (
            ("generate", "--prompt", "x", "--model", "VLM", "--image", "none.png"),
            "none.png",
        ),
        (("generate", "--prompt", "x", "--model", "VLM", "--image", __file__), "is not an image"),
        (("generate", "--prompt", "x", "--model", "tests/none"), "there is no model folder"),
        (("generate", "--prompt", "x", "--model", __file__), "give the folder"),
        (
            ("zoo", "train", "llava-drafter", "--out", __file__),
            "test_cli.py: Not a directory; give another path",
        ),
        (("generate", "--model", "zoo:llava", "--prompt", "<image>"), "--image adds them"),
        (("bench", "sweep", "--prompt", "<image>"), "give a text without image tokens"),
        (("generate", "--prompt", "x", "--model", "TEXT", "--out", "x.png"), "writes no files"),
        (
            ("generate", "--prompt", "x", "--model", "TEXT", "--tree", "3,0,1"),
            "has an invalid width",
        ),
        (("generate", "--prompt", "x", "--modality", "music"), "modality 'music' is not known"),
        (("bench", "--model", "VLM", "--kind", "cat"), "choose one of caption, question"),
        (
            ("generate", "--prompt", "x", "--model", "TEXT", "--recipe", "coupled"),
            "needs a draft model",
        ),
        (
            ("generate", "--prompt", "x", "--model", "TEXT", "--drafter", "OTHER"),
            "shares 0.0% of its tokens with that of the target",
        ),
        (
            ("bench", "--model", "TEXT", "--recipe", "suffix", "--drafter", "OTHER"),
            "takes no draft model",
        ),
        (("bench", "scale", "--shape", "gpt-9"), "known shapes"),
        (("bench", "overlap", "--model", "VLM", "--window", "1"), "--window 1 is too small"),
        (("bench", "overlap", "--model", "VLM"), "needs a draft model"),
        (
            (
                *("bench", "overlap", "--model", "TEXT", "--drafter", "TEXT", "--prompt", "w5"),
                *("--repeats", "1", "--max-new-tokens", "1"),
            ),
            "allow more --max-new-tokens",
        ),
        (("bench", "views", "--shape", "gpt-9"), "known shapes"),
        (("bench", "views", "--shape", "tiny", "--visual", "0"), "visual=0 must be a whole number"),
        (
            ("bench", "views", "--shape", "tiny", "--tokens", "-1"),
            "tokens=-1 must be a whole number",
        ),
        (("bench", "scale", "--shape", "tiny", "--dtype", "int8"), "no floating dtype"),
        (
            ("bench", "scale", "--shape", "tiny", "--device", "tpu9"),
            "device='tpu9' is not available",
        ),
        (
            ("bench", "scale", "--shape", "tiny", "--context", "-4"),
            "context=-4 must be a whole number",
        ),
        (
            ("bench", "scale", "--shape", "tiny", "--acceptance", "2"),
            "acceptance=2.0 must be a number",
        ),
        (("certify", "coupled", "--modality", "mar"), "'coupled' decodes tokens"),
        (("generate", "--prompt", "x", "--modle", "y"), "see `mmspec generate --help`"),
        (("bench", "sweep", "--seed"), "--help`"),
        (("generate", "--prompt", "x", "--model", ""), "there is no model folder ''"),
        (("generate", "--prompt", "x", "--drafter", ""), "there is no model folder ''"),
        (("doctor", "tests/cli"), "tests/cli holds no model"),
        (("zoo", "path", "cat"), "choose one of"),
        (("bogus",), "No such command 'bogus'"),
        (("convert", "--out", "x"), "--out and --set are of a format"),
        (("convert", "eagle"), "format eagle becomes a folder"),
        (("bench", "--modality", "image", "--seed", "-1"), "Invalid value for '--seed'"),
        (("doctor", "--all", "--device", "cpu"), "--all measures every class"),
        (("doctor", "--all", "--modality", "mar"), "no classes to measure for modality mar"),
        (("doctor", "zoo:llava", "--modality", "image"), "zoo:llava is of modality vlm, not image"),
        (("recipes", "--json", "--markdown"), "one of --index, --write, --markdown, --json"),
        (("recipes", "--index", "--modality", "vlm"), "--index and --write are of all recipes"),
        (("bench", "--model", "TEXT", "--recipe", "all", "--recipe", "nope"), "no recipe 'nope'"),
        (("bench", "--model", "TEXT", "--recipe", "all", "--recipe", "asd"), "decodes latents"),
        (("generate", "--prompt", "x", "--temperature", "nan"), "temperature=nan is not a number"),
        (
            ("generate", "--prompt", "x", "--length", "4", "--set", "length=2"),
            "--set length and --length are the same",
        ),
        (
            ("generate", "--prompt", "x", "--set", "drafter=y"),
            "drafter is set by --drafter; give that",
        ),
        (
            ("generate", "--prompt", "x", "--set", "coupled.recipe=y"),
            "recipe is set by --recipe; give that",
        ),
        (
            ("generate", "--prompt", "x", "--length", "\u00b2"),
            "length='\u00b2' is not a draft length",
        ),
        (("generate", "--prompt", "x", "--max-new-tokens", "0"), "max_new_tokens=0 is too small"),
        (("bench", "views", "--length", "999999999999"), "'--length': Input should be less than"),
        (("bench", "views", "--visual", "999999999999"), "'--visual': Input should be less than"),
        (("generate", "--prompt", "x", "--threads", f"{10**18}"), "less than or equal to 1024"),
        (
            (
                *("generate", "--prompt", "x", "--model", "TEXT", "--drafter", "TEXT"),
                *("--recipe", "spec-infer", "--tree", "999999999999"),
            ),
            "tree=[999999999999] has more than 4096 nodes",
        ),
        (("doctor", "DEEP"), "requires num_hidden_layers=1000000000, and at most 2000"),
        (("generate", "--prompt", "x", "--model", "PIPE"), "config.json is a pipe or a device"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    folders: dict[str, str],
    tmp_path: Path,
) -> None:
    for name in ("deep", "pipe"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "config.json")
    (tmp_path / "deep" / "config.json").write_text('{"num_hidden_layers": 1000000000}')
    names = {"TEXT": folders["text"], "OTHER": folders["other"], "VLM": folders["vlm"]}
    names |= {"DEEP": str(tmp_path / "deep"), "PIPE": str(tmp_path / "pipe")}
    _, line = fail(capsys, *(names.get(word, word) for word in arguments))
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate",), "the prompt is empty"),
        (("generate", "--modality", "image", "--prompt", " "), "the prompt is empty"),
        (("bench", "--prompt", ""), "the prompt is empty"),
        (("generate", "--prompt", "x", "--image", "no.png"), "there is no image no.png"),
        (("generate", "--prompt", "x", "--tree", "c2t:head=no"), "no holds no tree head"),
        (("bench", "--length", "entropy:g=1"), "'g=1' is not a parameter of 'entropy'"),
        (("bench", "--set", "coupled.tree=dynamics", "--recipe", "coupled"), "tree='dynamics' is"),
        (("bench", "--image", "no.png"), "there is no image no.png; give --image another"),
        (("generate", "--prompt", "x", "--video", "no.mp4"), "there is no video no.mp4"),
        (
            ("generate", "--prompt", "x", "--model", "zoo:llava", "--video", "zoo:clip"),
            "zoo:llava reads no video; drop --video, or choose a model that does, such as zoo:vid",
        ),
        (("generate", "--modality", "asr"), "reads an audio file; give --audio a file"),
        (("bench", "--model", "zoo:whisper", "--audio", "no.wav"), "there is no audio file no.wav"),
        (("generate", "--prompt", "x", "--drafter", "tests/cli"), "tests/cli holds no model"),
    ],
)
@needs_zoo
def test_inputs_are_looked_at_before_models_load(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(registry, "plug", load)
    assert message in fail(capsys, *arguments)[1]


def test_a_clip_selects_a_bundled_model_that_reads_it() -> None:
    assert select(ModelOptions(settings={"video": "zoo:clip"})).model == "zoo:video"


@pytest.mark.exhaustive
def test_overlapped_schedules_are_timed(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    asked: tuple[str, ...] = ("bench", "overlap", "--model", folders["text"], "--window", "3")
    asked += ("--drafter", folders["text-drafter"], "--prompt", "w5 w6 w7", "--prompts", "1")
    asked += ("--max-new-tokens", "12", "--repeats", "1")
    for more in ((), ("--refill",)):
        (point,) = run(capsys, *asked, *more)["points"]
        assert point["identical"] is True
        assert min(point[name] for name in ("draft_ms", "target_ms", "predicted", "measured")) > 0
    assert main(list(asked)) == 0
    assert "predicted for two" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_schedules_are_timed_on_a_clock(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    asked: tuple[str, ...] = ("bench", "schedules", "--model", folders["text"], "--ratio", "4")
    asked += ("--drafter", folders["text-drafter"], "--prompt", "w5 w6 w7", "--prompts", "1")
    asked += ("--max-new-tokens", "12", "--stages", "1", "--stages", "4")
    found = run(capsys, *asked)
    assert [(one["ratio"], one["stages"]) for one in found["points"]] == [(4, 1), (4, 4)]
    one, four = found["points"]
    assert one["pipeline"] == one["buffer"] == four["buffer"] <= four["pipeline"]
    assert 0 <= found["agreement"] <= 1
    assert main(list(asked)) == 0
    assert "speed over plain decoding" in capsys.readouterr().out


def test_debugging_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_DEBUG", "1")
    with pytest.raises(ValueError, match="no recipe"):
        main(["show", "nope"])


def test_a_pair_that_fits(capsys: pytest.CaptureFixture[str], folders: dict[str, str]) -> None:
    found = run(capsys, "doctor", folders["vlm"], folders["vlm-drafter"])
    assert (found["refused"], found["modality"]) == (False, "vlm")
    looked = {finding["check"]: finding for finding in found["findings"]}
    assert looked["drafter sees nothing"]["drafter"] is True
    assert looked["drafter sees pixels"]["verdict"] == "note"
    assert "coupled" in looked["recipes that fit with this draft model"]["target"]
    assert main(["doctor", folders["vlm"]]) == 0
    out = capsys.readouterr().out
    assert "this works" in out
    assert len(out.splitlines()) < 30


def test_the_doctor_says_when_the_commands_have_no_processor(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From Python such a folder works, with inputs of one's own."""

    def look(folder: Path) -> dict[str, Any]:
        findings = run(capsys, "doctor", str(folder))["findings"]
        return next(one for one in findings if one["check"] == "processor")

    shutil.copytree(zoo.path("llava-drafter"), tmp_path / "whole")
    shutil.copytree(
        zoo.path("llava-drafter"),
        tmp_path / "bare",
        ignore=shutil.ignore_patterns("*processor*", "tokenizer*"),
    )
    assert look(tmp_path / "whole")["target"] == "LlavaProcessor"
    found = look(tmp_path / "bare")
    assert (found["target"], found["verdict"]) == (None, "note")
    assert "commands need one" in found["remark"]


def test_a_pair_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    assert main(["doctor", folders["text"], folders["other"], "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["refused"] is True
    assert "vocabulary of 2000" in err


@pytest.mark.exhaustive
@needs_zoo
def test_a_pair_of_other_tokenizers_fits_recipes_that_share_tokens(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pair = ("zoo:llava-text-drafter", "zoo:qwen2.5-vl-text-drafter")
    found = run(capsys, "doctor", *pair)
    looked = {finding["check"]: finding for finding in found["findings"]}
    assert looked["same token ids"]["verdict"] == "note"
    assert "draft model's tokens that the target has" in looked["same token ids"]["remark"]
    fitting = looked["recipes that fit with this draft model"]["target"].split(", ")
    assert {"coupled", "tli", "uad"} <= set(fitting)
    assert "polybasic" not in fitting
    assert not caplog.records  # of each recipe that was tried


@pytest.mark.exhaustive
@needs_zoo
def test_every_modality_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    for pair in (
        ("zoo:image", "zoo:image-head"),
        ("zoo:image", "zoo:image-drafter"),
        ("zoo:image", "zoo:image-sketch"),  # of a smaller picture, with codes of its own
        ("zoo:mar", "zoo:mar-drafter"),
        ("zoo:diffusion", "zoo:diffusion-drafter"),
    ):
        found = run(capsys, "doctor", *pair)
        assert not found["refused"]
        assert len(found["findings"]) < 15
        assert any("parameters, safetensors" in str(one["target"]) for one in found["findings"])
    for pair, message in (
        (("zoo:llava", "zoo:image-head"), "made for another target"),
        (("zoo:mar", "zoo:llava"), "not 'mar'"),
        (("zoo:diffusion", "zoo:mar"), "must be a pipeline or a denoiser"),
    ):
        assert main(["doctor", *pair, "--json"]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("head", ["llava-feature-head", "llava-medusa", "image-head"])
def test_a_head_is_no_target(capsys: pytest.CaptureFixture[str], head: str) -> None:
    assert main(["doctor", f"zoo:{head}"]) == 1
    assert "give it as drafter=" in capsys.readouterr().err
    with pytest.raises(ValueError, match="reads no tokens"):
        accelerate(zoo.load(head))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(b""), "is empty or cut off"),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "copy it again"),
        (lambda file: file.write_bytes(b"\xff" * 64), "is empty or cut off"),
        (lambda file: drop(file), "weights are missing"),
        (lambda file: file.unlink(), "has no weights"),
    ],
    ids=["empty", "cut off", "noise", "one tensor less", "gone"],
)
def test_damaged_weights_are_refused_by_all(
    damage: Any,
    message: str,
    capsys: pytest.CaptureFixture[str],
    folders: dict[str, str],
    tmp_path: Path,
) -> None:
    where = tmp_path / "damaged"
    shutil.copytree(folders["text"], where)
    damage(where / "model.safetensors")
    assert main(["doctor", str(where)]) == 1
    assert message in capsys.readouterr().err
    _, line = fail(capsys, "generate", "--prompt", "w5", "--model", str(where), "--no-compare")
    assert str(where) in line


def test_a_damaged_configuration_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    for command in (("doctor",), ("generate", "--prompt", "x", "--model")):
        assert str(tmp_path / "config.json") in fail(capsys, *command, str(tmp_path))[1]


def test_code_in_a_folder_is_never_run(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    where, mark = tmp_path / "hostile", tmp_path / "ran"
    shutil.copytree(folders["text"], where)
    (where / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for name, key in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        content = json.loads((where / name).read_text())
        own = ["code.Own", None] if key == "AutoTokenizer" else "code.Own"
        content |= {"auto_map": {key: own}, "model_type": "own", "tokenizer_class": "Own"}
        (where / name).write_text(json.dumps(content))
    for command in (
        ("doctor", str(where)),
        ("generate", "--prompt", "w5", "--model", str(where)),
        ("bench", "--model", folders["text"], "--drafter", str(where)),
    ):
        main(list(command))
        assert not mark.exists()
        assert "trust_remote_code" in capsys.readouterr().err


def test_pickled_weights_are_refused(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((Path(folders["text"]) / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert main(["doctor", str(tmp_path)]) == 1
    assert "unpickling runs code" in capsys.readouterr().err
    _, line = fail(capsys, "generate", "--prompt", "x", "--model", str(tmp_path))
    assert "unpickling runs code" in line


def test_a_pair_is_benchmarked(capsys: pytest.CaptureFixture[str], folders: dict[str, str]) -> None:
    asked: tuple[str, ...] = (
        "bench",
        "--model",
        folders["text"],
        "--drafter",
        folders["text-drafter"],
    )
    asked += ("--prompt", "w5 w6", "--repeats", "1", "--max-new-tokens", "6")
    found = run(capsys, *asked)
    assert [row["recipe"] for row in found["rows"]] == ["plain", "coupled"]
    assert found["rows"][1]["drafter"] == folders["text-drafter"]
    wanted = {"generate", "assisted_as_shipped", "assisted", "prompt_lookup"}
    assert {row["recipe"] for row in found["baselines"]} == wanted
    assert main([*asked, "--batch", "2", "--no-peers"]) == 0
    out = capsys.readouterr().out
    assert "efficiency" in out
    assert "batch 2" in out


def test_all_recipes_are_measured_that_fit_and_ranked(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], tmp_path: Path
) -> None:
    asked = ("bench", "--model", folders["text"], "--prompt", "w5 w6", "--repeats", "1")
    quick = ("--max-new-tokens", "2", "--no-peers", "--no-efficiency", "--recipe", "all")
    found = run(capsys, *asked, *quick, "--out", str(tmp_path / "ranking.md"))
    measured = {row["recipe"] for row in found["rows"]}
    speeds = [row["speedup_end_to_end"] for row in found["rows"]]
    assert speeds == sorted(speeds, reverse=True)
    table, _, left_out = (tmp_path / "ranking.md").read_text().partition("Left out:")
    lines = [line.split(" | ")[1] for line in table.splitlines() if " | " in line]
    assert [name for name in lines if name in measured] == [r["recipe"] for r in found["rows"]]
    assert all(f"`{name}`" in left_out for name in found["left_out"])
    assert measured.isdisjoint(found["left_out"])
    assert measured | set(found["left_out"]) == set(recipes.names("tokens"))
    assert "needs a draft model" in found["left_out"]["coupled"]
    assert {"plain", "suffix"} <= measured


def test_a_recipe_that_does_not_fit_ends_no_bench(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    asked = ["bench", "--model", folders["text"], "--prompt", "w5", "--repeats", "1"]
    asked += ["--max-new-tokens", "2", "--no-peers", "--no-efficiency"]
    found = run(capsys, *asked, "--recipe", "suffix", "--recipe", "smud")
    assert [row["recipe"] for row in found["rows"]] == ["plain", "suffix"]
    assert "CTC head" in found["left_out"]["smud"]
    assert "CTC head" in fail(capsys, *asked, "--recipe", "smud")[1]
    assert "CTC head" in fail(capsys, *asked, "--recipe", "ctc-ssd", "--recipe", "smud")[1]


def test_shapes_are_scaled(capsys: pytest.CaptureFixture[str]) -> None:
    assert "llava-1.5-7b" in run(capsys, "bench", "scale", "--shape", "list")
    asked: tuple[str, ...] = (
        "bench",
        "scale",
        "--shape",
        "tiny",
        "--context",
        "16",
        "--acceptance",
        "0.9",
    )
    asked += ("--max-new-tokens", "8", "--repeats", "1", "--device", "cpu")
    assert len(run(capsys, *asked)["points"]) == 2
    assert main(list(asked)) == 0
    assert "engine efficiency" in capsys.readouterr().out


def test_a_recipe_is_certified(capsys: pytest.CaptureFixture[str], folders: dict[str, str]) -> None:
    asked: tuple[str, ...] = ("certify", "coupled", "--model", folders["text"])
    asked += ("--drafter", folders["text-drafter"], "--prompts", "2", "--seeds", "2")
    asked += ("--samples", "500", "--max-new-tokens", "6")
    found = run(capsys, *asked)
    assert found["verdict"] == "exact"
    assert [check["outcome"] for check in found["checks"]][-2:] == ["passed", "passed"]
    assert main(list(asked)) == 0
    assert "claims to be exact: exact" in capsys.readouterr().out


def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ranking.csv"
    check_writable("--out", file)
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    with pytest.raises(ValueError, match=r"cannot be written to; choose another --out"):
        check_writable("--out", file)
    file.touch()
    check_writable("--out", file)


def test_a_checkpoint_has_one_folder_by_any_of_its_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {run(capsys, "zoo", "path", name)["path"] for name in ("llava", "vlm", "zoo:llava")}
    assert found == {str(zoo.path("llava"))}


def test_the_zoo_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert [entry["name"] for entry in run(capsys, "zoo", "list")] == list(zoo.names())
    assert run(capsys, "zoo", "path", "vlm")["path"] == str(zoo.path("llava"))


def test_training_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(name: str, out: Any, steps: Any, seed: int, progress: Any, force: bool) -> Any:
        progress("talk", 1, 2, 0.5)
        if seed == 8:
            raise KeyboardInterrupt("interrupted; what was learnt is in here")
        return {"name": name, "steps": steps, "seed": seed, "force": force}

    monkeypatch.setattr("mmspec.zoo.train", train)
    found = run(capsys, "zoo", "train", "llava", "--steps", "3", "--seed", "7")
    assert found == {"name": "llava", "steps": 3, "seed": 7, "force": False}
    assert run(capsys, "zoo", "train", "llava", "--force")["force"] is True
    assert main(["zoo", "train", "llava", "--seed", "8"]) == 130
    assert "what was learnt is in here" in capsys.readouterr().err


def test_training_does_not_overwrite_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "train", "llava", "--steps", "1"]) != 0
    assert "llava is in " in (told := capsys.readouterr().err)
    assert "--out" in told
    assert "--force" in told


@pytest.mark.parametrize("own", [one.name for one in registry.modalities().values() if one.zoo])
@pytest.mark.parametrize("command", ["generate", "bench"])
def test_options_of_other_modalities_are_one_error(
    own: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every setting and part of one modality, given to another, names those that it has."""
    modality = registry.get(own)
    known = {one.name for one in select_settings(modality, command)} | set(modality.parts)
    target = next(entry.name for entry in modality.zoo if entry.target is None)
    asked = (command, "--model", f"zoo:{target}", "--prompt", "x")
    others = {
        one.name: one
        for other in registry.modalities().values()
        for one in select_settings(other, command)
    }
    foreign = sorted({*others, *PARTS} - known)
    assert foreign
    for name in foreign:
        is_flag = name in others and isinstance(others[name].default, bool)
        _, line = fail(capsys, *asked, flag(name), *(() if is_flag else ("1",)))
        assert line.startswith(f"error: {flag(name)}: no option of `mmspec {command}`")
        shown = line.partition("it has ")[2].split(", ")
        assert {one.removeprefix("--").replace("-", "_") for one in shown} <= known


def test_the_index_of_recipes_is_what_the_recipes_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--index"]) == 0
    assert capsys.readouterr().out == recipes.INDEX.read_text(encoding="utf-8"), (
        "run `mmspec recipes --write`"
    )


def test_a_stale_entry_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = json.loads(recipes.index())
    stale["asd"] |= {"sha256": "0", "summary": "stale"}
    stale["sjd"] |= {"summary": "cached"}
    monkeypatch.setattr(recipes, "_index", lambda: stale)
    assert recipes.describe("asd") == recipes.describe_module("asd")
    assert recipes.describe("sjd")["summary"] == "cached"


def test_recipes_of_other_packages_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("strange", "mmspec.recipes.coupled", recipes.GROUP)
    monkeypatch.setattr(recipes, "entry_points", lambda group: [point])
    for cached in (recipes.modules, recipes._list_names, recipes._load):
        cached.cache_clear()
    try:
        assert "strange" in recipes.names("tokens")
        assert recipes.get("strange").name == "strange"
        assert run(capsys, "show", "strange")["summary"] == recipes.summary("coupled")
        assert "strange" not in json.loads(recipes.index())
    finally:
        for cached in (recipes.modules, recipes._list_names, recipes._load):
            cached.cache_clear()


@pytest.mark.parametrize(
    ("home", "point", "message"),
    [
        (registry, "mmspec.stranger:MODALITY", "touch = mmspec.stranger:MODALITY .*.ModuleNotFo"),
        (registry, "mmspec.modality:MODALITY", "cannot be loaded .AttributeError: .*; fix or un"),
        (registry, "mmspec.modality:PICTURE_FILES", "is a tuple, not a Modality"),
        (recipes, "mmspec.stranger", "recipe 'touch': mmspec.stranger cannot be imported .Module"),
        (recipes, "mmspec.trees", "recipe 'touch': module mmspec.trees has no RECIPE"),
        (recipes, "mmspec.recipes.suffix:RECIPE", "suffix:RECIPE cannot be imported"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(
    home: Any, point: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = EntryPoint("touch", point, home.GROUP)
    monkeypatch.setattr(home, "entry_points", lambda group: [made])
    looked = (registry.modalities, recipes.modules, recipes._list_names, recipes._load)
    for one in looked:
        one.cache_clear()
    try:
        with pytest.raises(ValueError, match=message):
            registry.modalities() if home is registry else recipes.describe("touch")
    finally:
        for one in looked:
            one.cache_clear()


LIGHT = {
    command: (
        f"import sys; from mmspec.cli import main; code = main({command.split()!r}); "
        "assert not {'torch', 'transformers', 'diffusers'} & {*sys.modules}; sys.exit(code)"
    )
    for command in (
        "recipes",
        "recipes --modality diffusion",
        "show asd",
        "zoo list",
        "--help",
        "generate -h",
        "bench --help",
        "train phrases --help",
    )
}


@pytest.mark.parametrize(
    "command", exhaustive(LIGHT, ("recipes", "zoo list", "generate -h", "train phrases --help"))
)
def test_what_needs_no_torch_does_not_import_it(command: str) -> None:
    code = LIGHT[command]
    done = run_forked([code], "typer", "rich.table", "rich.console")[code]
    assert done.status == 0, done.err
    assert done.out


def test_help_groups_options_by_modality(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "--help"])
    out = capsys.readouterr().out
    assert "Of modality vlm" in out
    assert "Of modality image, mar, asr" in out
    assert "--kind" not in out  # of bench only


def test_help_of_certify_explains_its_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prompts do; samples are compared for the seeds 0, 1, ... whatever it is."""
    main(["certify", "--help"])
    out = capsys.readouterr().out
    assert "All noise follows" not in out
    assert "Selects the prompts" in out


def test_an_interrupt_reports_what_is_complete(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **given: Any) -> None:
        raise KeyboardInterrupt

    asked = ["generate", "--model", folders["text"], "--prompt", "w5", "--max-new-tokens", "2"]
    monkeypatch.setattr("mmspec.bench.compare", stop)
    assert main(asked) == 130
    assert "the output is complete" in capsys.readouterr().err
    monkeypatch.setattr("mmspec.cli.models.LoadedModels.call", stop)
    assert main(asked) == 130
    assert "nothing was written" in capsys.readouterr().err


def test_the_settings_of_the_zoo_are_those_it_was_judged_at() -> None:
    mar, pipe = zoo.info("mar").settings, zoo.info("diffusion").settings
    assert zoo.info("image").settings == {"guidance": image_models.GUIDANCE}
    assert tuple(mar.values()) == (mar_models.STEPS, mar_models.GUIDANCE, mar_models.HEAD_STEPS)
    assert pipe["steps"] == diffusion_models.STEPS
    assert pipe["guidance"] == diffusion_models.GUIDANCE


def test_the_console_script_starts() -> None:
    code = "import sys; from mmspec.cli import main; sys.exit(main(['--version']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0
    assert done.stdout.strip() == "0.1.0"


@needs_zoo
@pytest.mark.parametrize(
    "model", ["zoo:vlm", pytest.param("zoo:qwen2.5-vl", marks=pytest.mark.exhaustive)]
)
def test_the_zoo_describes_its_scene(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(
        capsys,
        *("generate", "--model", model, "--image", str(zoo.bundled_scene())),
        *("--prompt", "describe the picture", "--repeats", "1"),
    )
    assert found["identical_to_generate"] is True
    assert found["stats"]["drafter_saw"] == "pixels"
    assert found["stats"]["mean_acceptance_length"] > 2
    assert "orange star" in found["text"]


@needs_zoo
def test_models_and_recipes_select_modality_and_drafter(tmp_path: Path) -> None:
    def choose_parts(**said: Any) -> tuple[str, str, str | None]:
        found = select(ModelOptions(**said))
        return found.owner.name, found.recipe, found.drafters[found.recipe]

    assert choose_parts(model="zoo:vlm") == ("vlm", "coupled", "zoo:llava-drafter")
    blind = ("vlm", "spd-mllm", "zoo:llava-text-drafter")
    assert choose_parts(model="zoo:vlm", recipe=["spd-mllm"]) == blind
    assert choose_parts(model="zoo:vlm", recipe=["suffix"]) == ("vlm", "suffix", None)
    assert choose_parts() == ("vlm", "coupled", "zoo:llava-drafter")
    assert choose_parts(recipe=["asd"]) == ("diffusion", "asd", None)
    drafted = ("diffusion", "accelerated-diffusion", "zoo:diffusion-drafter")
    assert choose_parts(recipe=["accelerated-diffusion"]) == drafted
    assert choose_parts(model="someone/pipeline", recipe=["asd"]) == ("diffusion", "asd", None)
    assert choose_parts(modality="image") == ("image", "mc-sjd-gumbel", None)
    for recipe, drafter in (("eagle", "head"), ("mulo-sd", "sketch"), ("coupled", "drafter")):
        wanted = ("image", recipe, f"zoo:image-{drafter}")
        assert choose_parts(model="zoo:image", recipe=[recipe]) == wanted
    assert choose_parts(model="zoo:mar") == ("mar", "cspd-coupled", "zoo:mar-drafter")
    with pytest.raises(ValueError, match="'asd' decodes latents, but zoo:vlm gives tokens"):
        choose_parts(model="zoo:vlm", recipe=["asd"])
    other = "eagle takes draft models of another kind than --drafter zoo:image-drafter; give reci"
    with pytest.raises(ValueError, match=other):
        choose_parts(model="zoo:image", recipe=["eagle", "coupled"], drafter="zoo:image-drafter")
    blind_drafter, any_words = "zoo:llava-text-drafter", ["coupled", "tli", "uad"]
    given = ModelOptions(model="zoo:llava", drafter=blind_drafter, recipe=any_words)
    assert list(select(given).recipes) == any_words
    every = select(ModelOptions(model="zoo:llava", drafter=blind_drafter, recipe=["all"]))
    assert {"coupled", "tli", "uad", "lookahead"} <= set(every.recipes)
    assert "which --drafter zoo:llava-text-drafter is not" in every.left_out["eagle"]


def test_options_are_numbers_lists_and_words() -> None:
    typed = ["a=2", "b=0.5", "c=inf", "d=true", "e=[1, 2]", "f=near=far"]
    wanted = {"a": 2, "b": 0.5, "c": math.inf, "d": True, "e": [1, 2], "f": "near=far"}
    assert parse_pairs(typed) == wanted
    for pair in ("x", "=3", "x="):
        with pytest.raises(ValueError, match="give NAME=VALUE"):
            parse_pairs([pair])


def test_an_option_is_of_all_recipes_or_of_one() -> None:
    overrides = ["radius=5", "spec-vla.length=6", "spec-vla.radius=7"]
    said = ModelOptions(
        model="zoo:vla", recipe=["spec-vla", "hold-last-tolerance"], overrides=overrides
    )
    found = select(said)
    assert found.options == {"radius": 5}
    assert found.own_options == {"spec-vla": {"length": 6, "radius": 7}}
    with pytest.raises(ValueError, match="'kerv', which is not selected; selected: spec-"):
        select(replace(said, overrides=["kerv.length=6"]))


def test_an_option_of_one_recipe_reaches_that_one_and_names_its_row() -> None:
    recipes = ["prompt-lookup", "suffix"]
    loaded = load_models(
        "zoo:llava", "vlm", None, recipes, overrides=["length=4", "suffix.length=2"]
    )
    max_length = {
        name: loaded.accelerate(name).session.bound.drafter.length.max_length for name in recipes
    }
    assert max_length == {"prompt-lookup": 4, "suffix": 2}
    assert loaded.accelerate_plain().recipe.name == "plain"
    assert _title("suffix", loaded.selection.own_options["suffix"]) == "suffix, length=2"
    assert _title("prompt-lookup", {}) == "prompt-lookup"
