"""`mmspec train RECIPE`: a head learns, goes on where it was stopped, and loses nothing."""

from __future__ import annotations

import json
import re
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mmspec
from mmspec import recipes
from mmspec.cli import main
from mmspec.modalities.common.tiny_models import random_drafter
from mmspec.models.heads.feature_head import load_head
from mmspec.training.head_trainer import HeadTrainer
from mmspec.training.heads import EAGLE
from mmspec.zoo.scene import sample
from mmspec.zoo.scene_tensors import render_pixels
from tests.cli.running import fail, run
from tests.covering import exhaustive
from tests.toys.folders import text_pair
from tests.training.test_trackers import read_scalars

PADDING = "tokens per step, share of padding"
SAID = "what is at the top? a red circle."


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaVA, text models, and data: pictures, one of them broken, and plain text."""
    from PIL import Image

    from tools.zoo.vlm.architecture import SIGHTED
    from tools.zoo.vlm.families import FAMILIES
    from tools.zoo.vlm.train import save

    found = tmp_path_factory.mktemp("train")
    torch.manual_seed(0)
    text_pair(found)
    family = FAMILIES["llava"]
    processor = family.build_processor()
    shape = replace(SIGHTED, layers=4)  # heads for engines do not tap the last one
    for name in ("vlm", "vlm-other"):
        save(family.build(shape, processor.tokenizer), processor, found / name, sees=True)
    (found / "pictures").mkdir()
    for number in range(5):
        Image.fromarray(render_pixels(sample(number))).save(found / "pictures" / f"{number}.png")
    (found / "pictures" / "broken.png").write_bytes(b"\x89PNG no")
    _write(
        found / "data.jsonl",
        *(
            {"prompt": "is it red?", "image": f"{number}.png", "answer": SAID}
            for number in range(4)
        ),
        {"prompt": "is it broken?", "image": "broken.png", "answer": SAID},
        {
            "messages": [
                {"role": "user", "content": "a text"},
                {"role": "assistant", "content": SAID},
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "<image>\nwhat is it?"},
                {"from": "gpt", "value": "a star."},
                {"from": "human", "value": "where?"},
                {"from": "gpt", "value": SAID},
            ],
            "image": "4.png",
        },
    )
    _write(found / "text.jsonl", *({"prompt": f"w{n} w{n + 3} w9"} for n in range(20, 32)))
    return found


def _write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _train_command(root: Path, out: Path, *more: str, recipe: str = "eagle-2") -> list[str]:
    given = ["train", recipe, "--target", str(root / "vlm"), "--data", str(root / "data.jsonl")]
    given += ["--images", str(root / "pictures"), "--out", str(out), "--batch", "2"]
    given += ["--max-bad-rows", "1"]  # broken.png
    return [*given, "--max-new-tokens", "8", "--answers", "data", "--held-out", "1", *more]


@contextmanager
def stopped(at: int, by: BaseException) -> Iterator[None]:
    """Training ends there, in the middle of a step."""
    whole = HeadTrainer.step

    def step(self: HeadTrainer, lessons: Any) -> float:
        if self.num_steps_done == at:
            with torch.no_grad():
                next(iter(self.head.parameters())).fill_(7.0)  # half of an update
            raise by
        return whole(self, lessons)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadTrainer, "step", step)
        yield


@pytest.mark.exhaustive
def test_a_training_that_was_killed_ends_with_the_same_weights(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, with averages and several batches a step; a broken picture is counted."""
    how = ("--steps", "5", "--every", "2", "--ema", "0.5", "--accumulate", "2", "--rate", "0.01")
    found = run(capsys, *_train_command(root, tmp_path / "whole", *how))
    assert (found["steps"], found["questions"] + found["held out"], found["left out"]) == (5, 7, 1)
    assert "data.jsonl:5 names broken.png: broken.png is not an image" in found["reasons"][0]
    (bad,) = map(json.loads, (tmp_path / "whole" / "bad_rows.jsonl").open())
    assert bad["place"].endswith("data.jsonl:5")
    with stopped(3, KeyboardInterrupt()):
        assert main(_train_command(root, tmp_path / "cut", *how)) == 130
    said = capsys.readouterr().err
    assert "interrupted at step 3; the same command goes on from step 2" in said
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    again = run(capsys, *_train_command(root, tmp_path / "cut", *how))
    assert again["history"] == found["history"]
    ours, theirs = (load_file(tmp_path / one / "model.safetensors") for one in ("whole", "cut"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    other = run(capsys, *_train_command(root, tmp_path / "other", *how, "--seed", "1"))
    assert other["history"] != found["history"]  # a seed matters
    head = load_head(tmp_path / "cut")
    model = mmspec.accelerate(str(root / "vlm"), "eagle-2", drafter=head).model
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    code, line = fail(capsys, *_train_command(root, tmp_path / "cut", *how, "--batch", "3"))
    assert "was begun with batch=2, not 3; give the same to resume" in line
    elsewhere = _train_command(root, tmp_path / "cut", *how)
    elsewhere[3] = str(root / "vlm-other")
    code, line = fail(capsys, *elsewhere)
    assert (code, "was begun with another target" in line) == (1, True)
    new = _train_command(root, tmp_path / "new", *how, "--head", str(tmp_path / "cut"))
    new[3] = str(root / "vlm-other")
    assert "was made for another target than" in fail(capsys, *new)[1]


def test_answers_that_are_lost_are_reported_and_made_again(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _train_command(root, tmp_path, "--steps", "1", "--every", "1")
    found, file = run(capsys, *command), tmp_path / "answers.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr()
    assert re.search(r"answers.jsonl has lost \d of 7 answers that", said.err)
    assert file.read_bytes() == whole
    assert json.loads(said.out)["history"] == found["history"]


@pytest.mark.exhaustive
def test_an_eagle_3_training_that_was_killed_halfway_ends_with_the_same_weights(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its states are its own, and Muon remembers a momentum for every weight matrix."""
    how = ("--steps", "4", "--every", "2", "--rate", "0.01", "--muon")
    whole, cut, adam = (
        _train_command(root, tmp_path / name, *how, recipe="eagle-3")
        for name in ("whole", "cut", "adam")
    )
    found = run(capsys, *whole)
    with stopped(3, KeyboardInterrupt()):
        assert main(cut) == 130
    capsys.readouterr()
    again = run(capsys, *cut)
    assert again["history"] == found["history"]
    ours, theirs = (load_file(tmp_path / one / "model.safetensors") for one in ("whole", "cut"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    adam.remove("--muon")
    assert run(capsys, *adam)["history"][1] != found["history"][1]
    assert "was begun with muon=True" in fail(capsys, *[a for a in cut if a != "--muon"])[1]


@pytest.mark.exhaustive
def test_the_coverage_of_a_draft_vocabulary_is_reported(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frequencies are those of the answers that are trained on."""
    how = ("--steps", "1", "--every", "1", "--set", "draft_vocab_size=4")
    found = run(capsys, *_train_command(root, tmp_path, *how, recipe="eagle-3"))
    trained, held_out = found["draft vocabulary covers, of trained and held-out answers"]
    answers = [json.loads(one) for one in (tmp_path / "answers.jsonl").open()]
    counts = Counter(token for one in answers for token in one["tokens"])
    most = sum(count for _, count in counts.most_common(4)) / counts.total()
    assert trained == pytest.approx(most, abs=0.1)
    assert 0 < held_out < 1
    plain = run(capsys, *_train_command(root, tmp_path / "a", *how[:4], recipe="eagle-3"))
    assert not any("vocabulary" in name for name in plain)


def test_an_eagle_3_head_is_trained_for_engines_by_default(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that reads image features instead cannot be exported."""
    kinds = (("placeholder", ()), ("fused", ("--visual-slots", "fused")))
    for name, extra in kinds:
        how = ("--steps", "1", "--every", "1", *extra)
        run(capsys, *_train_command(root, tmp_path / name, *how, recipe="eagle-3"))
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["visual_slots"] == name
    out = ["--out", str(tmp_path / "out")]
    assert (
        "train it with visual_slots=placeholder"
        in fail(capsys, "export", "vllm", str(tmp_path / "fused"), *out)[1]
    )
    assert run(capsys, "export", "vllm", str(tmp_path / "placeholder"), *out)["weights"] > 0


@pytest.mark.exhaustive
def test_a_packed_training_has_the_losses_of_an_unpacked_one(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to rounding, with less padding; another length does not resume it."""
    how = ("--steps", "3", "--every", "1", "--batch", "4", "--rate", "1e-3")
    found = {}
    for name, extra in (("whole", ()), ("packed", ("--pack", "256"))):
        command = _train_command(root, tmp_path / name, *how, *extra, recipe="eagle-3")
        found[name] = run(capsys, *command)
    tokens, padding = found["packed"][PADDING]
    assert (found["whole"][PADDING][0], padding) == (tokens, 0)  # one sequence a batch
    assert 0 < found["whole"][PADDING][1] < 0.5
    for ours, theirs in zip(found["packed"]["history"], found["whole"]["history"], strict=True):
        assert ours["loss"] == (theirs["loss"] and pytest.approx(theirs["loss"], rel=1e-3))
    command = _train_command(root, tmp_path / "packed", *how, recipe="eagle-3")
    assert "was begun with pack=256, not None" in fail(capsys, *command)[1]
    refused = _train_command(root, tmp_path / "a", *how, "--pack", "64", recipe="medusa")
    assert "lays out rows in a way of its own; drop --pack" in fail(capsys, *refused)[1]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("recipe", exhaustive(["eagle-3", "p-eagle", "dflash"], {"dflash"}))
def test_heads_of_several_layers_are_trained_exported_and_used(
    recipe: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["--steps", "2", "--every", "2", "--set", "num_hidden_layers=2"]
    how += ["--set", "num_taps=1"] if recipe == "dflash" else []
    trained, written = str(tmp_path / "head"), str(tmp_path / "written")
    run(capsys, *_train_command(root, tmp_path / "head", *how, recipe=recipe))
    assert json.loads((tmp_path / "head" / "config.json").read_text())["num_hidden_layers"] == 2
    layout = "vllm" if recipe == "eagle-3" else recipe
    assert run(capsys, "export", layout, trained, "--out", written)["weights"] > 0
    asked = ["generate", "--model", str(root / "vlm"), "--recipe", recipe, "--prompt", "is it?"]
    asked += ["--drafter", trained, "--image", str(root / "pictures" / "0.png")]
    found = run(capsys, *asked, "--max-new-tokens", "6")
    assert "target-states" in json.dumps(found)


@pytest.mark.parametrize(
    "recipe",
    [
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ctc-drafter", "owl")),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("amphista", "falcon", "mixture-of-attentions", "pass-sampling")
        ),
    ],
)
def test_heads_of_the_surveys_are_trained_and_used(
    recipe: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = str(tmp_path / "head")
    how = ("--steps", "2", "--every", "2")
    found = run(capsys, *_train_command(root, tmp_path / "head", *how, recipe=recipe))
    assert found["history"]
    asked = ["generate", "--model", str(root / "vlm"), "--recipe", recipe, "--prompt", "is it?"]
    asked += ["--drafter", trained, "--image", str(root / "pictures" / "0.png")]
    drafted = run(capsys, *asked, "--max-new-tokens", "6")
    plain = run(capsys, *asked[:4], "plain", *asked[5:7], *asked[9:], "--max-new-tokens", "6")
    assert drafted["text"] == plain["text"]


@pytest.mark.parametrize("recipe", exhaustive(("eagle-3", "hydra", "dream"), ("hydra",)))
def test_a_head_of_any_class_drafts_on_the_command_line(
    recipe: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = mmspec.accelerate(str(root / "vlm"), "plain").model
    random_drafter(recipes.get(recipe), model, 0).save_pretrained(tmp_path)
    asked = ["generate", "--model", str(root / "vlm"), "--recipe", recipe, "--prompt", "is it?"]
    asked += ["--drafter", str(tmp_path), "--image", str(root / "pictures" / "0.png")]
    found = run(capsys, *asked, "--max-new-tokens", "4")
    assert "target-states" in json.dumps(found)


@pytest.mark.exhaustive
def test_a_cache_of_features_changes_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two epochs, and killed in the second: the same file of weights, and losses as without."""
    how = ("--steps", "8", "--every", "3", "--rate", "0.003")
    found = run(capsys, *_train_command(root, tmp_path / "bare", *how))
    kept = run(
        capsys, *_train_command(root, tmp_path / "kept", *how, "--cache", str(tmp_path / "a"))
    )
    for mine, theirs in zip(kept["history"][1:], found["history"][1:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.01)
    cached = _train_command(root, tmp_path / "cut", *how, "--cache", str(tmp_path / "b"))
    with stopped(5, KeyboardInterrupt()):
        main(cached)
    assert run(capsys, *cached)["history"] == kept["history"]
    ours, theirs = (load_file(tmp_path / one / "model.safetensors") for one in ("kept", "cut"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    other = _train_command(
        root, tmp_path / "other", *how, "--cache", str(tmp_path / "a"), "--seed", "2"
    )
    line = fail(capsys, *other)[1]  # other questions are held out
    assert "was made with other answers; give --cache another folder" in line
    dry = run(
        capsys, *_train_command(root, tmp_path / "new", "--dry-run", "--cache", str(tmp_path / "c"))
    )
    assert dry["feature cache, at most about, GiB"] > 0
    assert not (tmp_path / "c").exists()
    tight = _train_command(root, tmp_path / "tight", *how, "--cache", str(tmp_path / "d"), "--json")
    with _files_up_to(20_000):
        line = fail(capsys, *tight)[1]
    assert "cannot be written" in line
    assert not [*(tmp_path / "d").glob("*.part")]


@pytest.mark.exhaustive
def test_a_text_model_learns_what_it_says_itself(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["train", "eagle", "--target", str(root / "text"), "--data", str(root / "text.jsonl")]
    asked += ["--out", str(tmp_path / "head"), "--steps", "60", "--every", "60", "--batch", "4"]
    asked += ["--max-new-tokens", "12", "--rate", "0.003", "--temperature", "0.5", "--bf16"]
    found = run(capsys, *asked)
    first, last = found["history"]
    assert last["acceptance"] > first["acceptance"] + 0.2
    answers = [json.loads(one) for one in (tmp_path / "head" / "answers.jsonl").open()]
    assert [one["question"] for one in answers] == list(range(12))
    assert len({tuple(one["tokens"]) for one in answers}) > 6


def test_a_dry_run_writes_and_loads_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(
        capsys, *_train_command(root, tmp_path / "new", "--dry-run", "--set", "num_hidden_layers=2")
    )
    one = run(capsys, *_train_command(root, tmp_path / "new", "--dry-run"))
    assert found["head parameters"] > 1.5 * one["head parameters"]
    assert (one["questions"], one["pictures"], one["measured on, unreadable"]) == (7, 5, [7, 0])
    assert [bad["reason"][:16] for bad in one["bad rows"]] == ["names broken.png"]
    assert not (tmp_path / "new").exists()


@pytest.mark.exhaustive
def test_a_dry_run_plans_for_the_head_in_a_folder(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = mmspec.accelerate(str(root / "vlm"), "plain").session.bound.backbone
    made: Any = EAGLE.begin(reader, torch.ones(reader.vocabulary), num_hidden_layers=2)
    made.save_pretrained(head := tmp_path / "head")
    asked = _train_command(root, tmp_path / "new", "--dry-run")
    given = run(capsys, *asked, "--head", str(head))
    assert given == run(capsys, *asked, "--set", "num_hidden_layers=2")
    asked = _train_command(root, tmp_path / "new", "--dry-run", recipe="gto")
    assert "plan has no figures for the trees" in fail(capsys, *asked, "--head", str(head))[1]


@contextmanager
def _files_up_to(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_tracker_logs_loss_rate_and_acceptance(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    how = ("--steps", "4", "--every", "2", "--track", "tensorboard")
    with stopped(3, KeyboardInterrupt()):
        assert main(_train_command(root, tmp_path, *how)) == 130
    found = run(capsys, *_train_command(root, tmp_path, *how))
    logged = read_scalars(tmp_path / "logs" / "tensorboard")
    assert [step for step, _ in logged["loss"]] == [1, 2, 3, 4]
    means = [sum(value for _, value in logged["loss"][at : at + 2]) / 2 for at in (0, 2)]
    assert means == pytest.approx([one["loss"] for one in found["history"][1:]], rel=1e-5)
    assert [one for _, one in logged["acceptance length"]] == pytest.approx(
        [one["acceptance"] for one in found["history"]]
    )
    rates = [one for _, one in logged["learning rate"]]
    assert len(rates) == 4
    assert rates[-1] < rates[0] == pytest.approx(1e-4)


def test_nothing_is_lost_on_a_full_disk(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ("--steps", "2", "--every", "1")
    with stopped(1, KeyboardInterrupt()):
        main(_train_command(root, tmp_path / "out", *how))
    there = (tmp_path / "out" / "checkpoint.safetensors").read_bytes()
    with _files_up_to(100_000):
        _, line = fail(capsys, *_train_command(root, tmp_path / "out", *how))
    assert "checkpoint.safetensors cannot be written" in line
    assert "free some space on its disk" in line
    assert (tmp_path / "out" / "checkpoint.safetensors").read_bytes() == there
    assert not [*(tmp_path / "out").glob("*.part")]
    assert run(capsys, *_train_command(root, tmp_path / "out", *how))["steps"] == 2
    made = (tmp_path / "out" / "model.safetensors").read_bytes()
    (tmp_path / "out" / "model.safetensors").unlink()
    with _files_up_to(1000):
        _, line = fail(capsys, *_train_command(root, tmp_path / "out", *how))
    assert "free some space on its disk" in line
    assert "its checkpoint holds the trained weights" in line
    assert not [*(tmp_path / "out").glob(".mmspec-*")]
    run(capsys, *_train_command(root, tmp_path / "out", *how))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == made


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "a <image> b"}] * 2, "has 1 marks of images .* but names 0 images"),
        ([{"prompt": "a", "image": "nowhere.png"}] * 2, "names the image nowhere.png, but there"),
        (
            [{"prompt": "a", "image": "broken.png", "answer": "b"}] * 2,
            r"rows.jsonl:1 names broken.png: broken.png is not .*2 of 2 rows .*--max-bad-rows 2",
        ),
        ([{"question": "a"}] * 2, r"rows.jsonl:1 has neither a prompt nor messages"),
        ([{"prompt": " "}] * 2, "has an empty question"),
        ([{"prompt": "a"}] * 2, "none of 2 questions can be trained on: .*:1 has no answer"),
        ([{"prompt": "a", "answer": "b"}], "has one row; give two or more"),
        ([{"messages": [{"role": "bot", "content": "a"}]}] * 2, "a turn of 'bot'"),
        (["a"] * 2, "is a str, not an object"),
        (
            [{"prompt": "a", "image": "../data.jsonl"}] * 2,
            r"names the image ../data.jsonl, which is outside of .*pictures; give --images",
        ),
        (
            [{"prompt": "a", "image": "/etc/hostname"}] * 2,
            "names the image /etc/hostname, which is outside",
        ),
        ([], "holds no question"),
    ],
)
def test_data_that_cannot_teach_are_one_error(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: Any, said: str
) -> None:
    data = _write(tmp_path / "rows.jsonl", *rows)
    asked = _train_command(root, tmp_path / "out")
    asked[5] = str(data)
    assert re.search(said, fail(capsys, *asked)[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {1: "coupled"},
            "recipe 'coupled' has no drafter .* choose one of .*eagle, eagle-2",
        ),
        ({3: "zoo:image"}, "models of modality image cannot be trained from files"),
        ({3: "{root}/text"}, "is a text model and takes no image, but .*data.jsonl:1 names"),
        ({5: "{root}/none.jsonl"}, "there is no .*none.jsonl"),
        ({7: "{root}/none"}, "there is no folder .*none; give --images"),
        ({9: "{root}"}, "holds something else than a training"),
    ],
    ids=["recipe", "modality", "text", "data", "images", "out"],
)
def test_mistakes_are_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, said: str
) -> None:
    asked = _train_command(root, tmp_path / "out")
    for place, value in change.items():
        asked[place] = value.format(root=root)
    assert re.search(said, fail(capsys, *asked)[1])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--set", "intermediat_size=8"), "did you mean intermediate_size"),
        (("--set", "cat=8"), "a FeatureHeadConfig has no such part"),
        (("--seed", "-1"), "Invalid value for '--seed'"),
        (("--rate", "inf"), "--rate=inf must be a number of at least 0"),
        (("--temperature", "inf"), "--temperature=inf must be a number"),
    ],
)
def test_options_that_no_head_looks_at_are_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: Any, said: str
) -> None:
    for also in ((), ("--dry-run",)):
        assert said in fail(capsys, *_train_command(root, tmp_path / "out", *more, *also))[1]
    assert not (tmp_path / "out").exists()


def test_a_file_in_another_encoding_is_named(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, data = _train_command(root, tmp_path / "out"), tmp_path / "rows.jsonl"
    asked[5] = str(data)
    data.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9t\xe9"}\n')
    assert "rows.jsonl:2 is not JSON ('utf-8' codec can't decode" in fail(capsys, *asked)[1]
