"""`mmspec train` of a policy's drafter: by data that lie there, and by episodes that it plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmspec
from mmspec import zoo
from mmspec.cli import main
from mmspec.modalities.vla.worlds import table
from mmspec.models.heads.action_slots import ActionSlots
from tests.modalities.vla.policies import SIZE, picture, policy, processor

WORDS = "reach the red circle"
ACTION = "0.01 0 0 0 0 0.1 1"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy and twelve moments of two kinds, with what some robot did."""
    made = tmp_path_factory.mktemp("train-policy")
    policy().save_pretrained(made / "policy")
    processor().save_pretrained(made / "policy")
    rows = [{"prompt": WORDS, "image": f"{at}.png", "answer": ACTION} for at in range(12)]
    for at, row in enumerate(rows):
        Image.fromarray(picture(at % 2)).save(made / row["image"])
    (made / "moments.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return made


def train(root: Path, data: str, out: Path, *more: str) -> list[str]:
    told = ["train", "oft-draft", "--target", str(root / "policy"), "--data", data]
    return [*told, "--out", str(out), "--batch", "4", "--threads", "1", *more]


def run(capsys: pytest.CaptureFixture[str], asked: list[str]) -> Any:
    capsys.readouterr()
    assert main([*asked, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.exhaustive
def test_slots_learn_what_the_policy_answers(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many tokens as an action has; a policy says no end. What was trained changes nothing."""
    asked = train(root, str(root / "moments.jsonl"), tmp_path, "--steps", "25", "--rate", "0.01")
    found = run(capsys, [*asked, "--every", "25"])
    assert found["tokens"] == SIZE * found["questions"]
    assert found["loss"] < 2
    assert found["acceptance length"] > found["acceptance length before"] >= 1
    head = ActionSlots.from_pretrained(tmp_path)
    assert head.config.num_slots == SIZE
    given = {"image": picture(1), "instruction": WORDS}
    made: Any = {"modality": "vla", "processor": processor()}
    plain = mmspec.accelerate(policy(), "plain", **made).predict_action(**given)
    fast = mmspec.accelerate(policy(), "oft-draft", drafter=tmp_path, **made)
    assert (fast.predict_action(**given) == plain).all()


def test_a_robot_s_own_actions_are_answers(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--answers", "data", "--steps", "1")
    run(capsys, train(root, str(root / "moments.jsonl"), tmp_path, *more))
    (said,) = {
        tuple(json.loads(line)["tokens"])
        for line in (tmp_path / "answers.jsonl").read_text().splitlines()
    }
    session: Any = mmspec.accelerate(policy(), "plain").session
    space = session.binder.bind_default().space
    wanted = torch.tensor([float(one) for one in ACTION.split()], dtype=torch.float64)
    got = space.unnormalise(space.decode(torch.tensor(said)))
    assert ((got - wanted).abs() <= space.bin_size / 2 + 1e-9).all()


def test_a_policy_plays_the_episodes_that_it_learns_from(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "MAX_STEPS", 5)
    out = tmp_path / "slots"
    found = run(capsys, train(root, "table:2", out, "--steps", "1", "--seed", "3"))
    rows = [json.loads(line) for line in (out / "played/table-2-3.jsonl").open()]
    assert found["questions"] + found["held out"] == len(rows) == 10
    assert {row["prompt"].split()[0] for row in rows} == {"reach"}
    assert Image.open(out / "played" / rows[-1]["image"]).size == (72, 72)
    before = (out / "played/table-2-3.jsonl").stat().st_mtime_ns
    run(capsys, train(root, "table:2", out, "--steps", "1", "--seed", "3"))  # nothing is left to do
    assert (out / "played/table-2-3.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        ("table:many", (), "no number of episodes; give table:64"),
        ("table:4", ("--dry-run",), "--dry-run records nothing"),
        ("moon:4", (), "there is no moon:4"),
        ("talk.jsonl", (), "has no picture"),
    ],
)
def test_what_nobody_can_learn_from_is_one_error(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data: str,
    more: tuple[str, ...],
    words: str,
) -> None:
    talk = [{"prompt": "hello"}, {"prompt": "you"}]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, talk)))
    given = str(tmp_path / data) if data.endswith("jsonl") else data
    assert main(train(root, given, tmp_path / "out", *more)) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "out" / "training.json").exists()


def test_a_language_model_plays_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--target", "zoo:llava", "--data", "table:4", "--out", str(tmp_path / "out")]
    assert zoo.is_present("llava")
    assert main(["train", "eagle", *told]) == 1
    assert "there is no table:4" in capsys.readouterr().err
