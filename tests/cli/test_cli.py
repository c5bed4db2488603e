"""Commands: what they print, one JSON document each, one clear line per error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec import recipes, zoo
from mmspec.cli import main
from tests import toys

WORDS = [f"w{number}" for number in range(200)]
HAS_ZOO = all(zoo.is_present(name) for name in zoo.names())
needs_zoo = pytest.mark.skipif(not HAS_ZOO, reason="the zoo is not trained yet")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small random models: a text pair, one of another vocabulary, a LLaVA with its drafter."""
    from mmspec.modalities.vlm.zoo.architecture import BLIND, SIGHTED
    from mmspec.modalities.vlm.zoo.families import FAMILIES
    from mmspec.modalities.vlm.zoo.train import save

    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, seed in (("text", 0), ("text-drafter", 1)):
        save_text(toys.model("llama", seed=seed), root / name, WORDS[: toys_vocabulary()])
    save_text(toys.model("llama", vocab_size=2000), root / "other", [f"x{i}" for i in range(2000)])
    family = FAMILIES["llava"]
    processor = family.build_processor()
    for name, shape in (("vlm", SIGHTED), ("vlm-drafter", BLIND)):
        model = family.build(shape, processor.tokenizer)
        save(model, processor, root / name, sees=name == "vlm")
    return {path.name: str(path) for path in root.iterdir()}


def toys_vocabulary() -> int:
    return int(toys.model("llama").config.vocab_size)


def save_text(model: Any, folder: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    table = {word: number for number, word in enumerate(["<pad>", "<bos>", *words[2:]])}
    core = Tokenizer(models.WordLevel(table, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    build: Any = PreTrainedTokenizerFast
    build(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>").save_pretrained(folder)
    model.get_output_embeddings().bias = None
    model.save_pretrained(folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """A command's JSON document; it must succeed and print nothing else."""
    capsys.readouterr()
    code = main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """A command's exit code and its one line on stderr."""
    capsys.readouterr()
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert code != 0
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return code, lines[0]


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run(capsys, "recipes")
    assert [row["name"] for row in listed] == list(recipes.names())
    assert all(row["summary"] and len(row) == 10 for row in listed)


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
    assert "speed-up over generate()" in out
    assert "identical to generate()" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "copled"), "did you mean 'coupled'?"),
        (("generate",), "Missing option '--prompt'"),
        (("generate", "--prompt", "x", "--model", "zoo:nope"), "not in the zoo"),
        (("generate", "--prompt", "x", "--model", "./nowhere"), "there is no model folder"),
        (("generate", "--prompt", "x", "--model", "TEXT", "--recipe", "nope"), "no recipe 'nope'"),
        (("generate", "--prompt", " ", "--model", "TEXT"), "the prompt is empty"),
        (
            ("generate", "--prompt", "x", "--model", "TEXT", "--image", "zoo:scene"),
            "takes no picture",
        ),
        (
            ("generate", "--prompt", "x", "--model", "VLM", "--image", "none.png"),
            "no picture none.png",
        ),
        (("generate", "--prompt", "x", "--model", "VLM", "--image", __file__), "not a picture"),
        (
            ("generate", "--prompt", "x", "--model", "TEXT", "--recipe", "coupled"),
            "needs a draft model",
        ),
        (
            ("generate", "--prompt", "x", "--model", "TEXT", "--drafter", "OTHER"),
            "vocabulary of 2000",
        ),
        (
            ("bench", "--model", "TEXT", "--recipe", "suffix", "--drafter", "OTHER"),
            "takes no draft model",
        ),
        (("bench", "scale", "--shape", "gpt-9"), "known shapes"),
        (("bench", "scale", "--shape", "tiny", "--dtype", "int8"), "no floating dtype"),
        (("zoo", "path", "cat"), "choose one of"),
        (("bogus",), "No such command 'bogus'"),
        (("generate", "--prompt", "x", "--max-new-tokens", "0"), "max-new-tokens"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    folders: dict[str, str],
) -> None:
    names = {"TEXT": folders["text"], "OTHER": folders["other"], "VLM": folders["vlm"]}
    _, line = fail(capsys, *(names.get(word, word) for word in arguments))
    assert message in line


def test_debugging_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEC_DEBUG", "1")
    with pytest.raises(ValueError, match="no recipe"):
        main(["show", "nope"])


def test_a_pair_that_fits(capsys: pytest.CaptureFixture[str], folders: dict[str, str]) -> None:
    found = run(capsys, "doctor", folders["vlm"], folders["vlm-drafter"])
    assert found["refused"] is False
    looked = {finding["check"]: finding for finding in found["findings"]}
    assert looked["drafter sees nothing"]["drafter"] is True
    assert looked["drafter sees pixels"]["verdict"] == "note"
    assert "coupled" in looked["recipes that fit"]["target"]
    assert main(["doctor", folders["vlm"]]) == 0
    assert "this works" in capsys.readouterr().out


def test_a_pair_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], folders: dict[str, str]
) -> None:
    assert main(["doctor", folders["text"], folders["other"], "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["refused"] is True
    assert "vocabulary of 2000" in err


def test_heads_and_models_that_draw_are_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    for drafter in ("zoo:image-head", "zoo:image-drafter"):
        found = run(capsys, "doctor", "zoo:image", drafter)
        looked = {finding["check"]: finding for finding in found["findings"]}
        assert looked["vocabulary"]["target"] == looked["vocabulary"]["drafter"] == 512
    assert main(["doctor", "zoo:llava", "zoo:image-head", "--json"]) == 1
    assert "a head for another target" in capsys.readouterr().err


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
    wanted = {"generate", "plain", "assisted_as_shipped", "assisted", "prompt_lookup"}
    assert set(found["peers"]) == wanted
    assert main([*asked, "--batch", "2", "--no-peers"]) == 0
    out = capsys.readouterr().out
    assert "engine efficiency" in out
    assert "batch 2" in out


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


def test_the_console_script_starts() -> None:
    code = "import sys; from mmspec.cli import main; sys.exit(main(['--version']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0
    assert done.stdout.strip() == "0.1.0"


@needs_zoo
@pytest.mark.parametrize("model", ["zoo:vlm", "zoo:qwen2.5-vl"])
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
def test_the_zoo_s_recipes_choose_their_drafters(capsys: pytest.CaptureFixture[str]) -> None:
    from mmspec.cli.inputs import choose

    assert choose("zoo:vlm", None, None) == ("coupled", "zoo:llava-drafter")
    assert choose("zoo:vlm", None, "spd-mllm") == ("spd-mllm", "zoo:llava-text-drafter")
    assert choose("zoo:vlm", None, "suffix") == ("suffix", None)
