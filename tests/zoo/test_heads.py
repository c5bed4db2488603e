"""All draft models of a target: what is done is kept, what was trained otherwise is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mmspec import zoo
from mmspec.cli import main
from mmspec.zoo import heads, training


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer of two draft models, which writes a file and no weights."""
    made: Any = ModuleType("two")
    made.ABOUT, made.NOTES, made.HELD_OUT, made.MINUTES = "One of two.", "", 3, 20.0
    made.trained, made.stop = [], None

    def names(target: str) -> list[zoo.Entry]:
        return [zoo.Entry(f"{target}-{one}", one, "two", "two", target) for one in ("a", "b")]

    def train(entry: Any, folder: Path, *given: Any, minutes: float, answers: Any) -> Any:
        if made.stop == entry.name:
            raise KeyboardInterrupt
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        made.trained.append((entry.name, minutes))
        return {"budget_minutes": minutes, "loss_curve": [2.0, None]}

    def measure(entry: Any, folder: Path, count: int, answers: Any) -> dict[str, Any]:
        return {"acceptance": {"caption": 2.5, "all": 2.5}}

    made.names, made.train, made.measure = names, train, measure
    monkeypatch.setitem(sys.modules, "two", made)
    monkeypatch.setattr(heads, "TRAINER", "two")
    return made


def test_heads_are_trained_in_turn_and_those_that_are_done_are_kept(
    trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["zoo", "train", "heads", "--all", "--target", "llava", "--out", str(tmp_path)]
    trainer.stop = "llava-b"
    assert main([*given, "--minutes", "5"]) == 130
    assert [one.name for one in tmp_path.iterdir()] == ["llava-a"]
    (tmp_path / "llava-b").mkdir()  # an empty folder is not a draft model
    trainer.stop = None
    capsys.readouterr()
    assert main([*given, "--minutes", "5"]) == 0
    said = capsys.readouterr().out.split("\n")
    assert said[0] == "llava-a: is there already, 2.5 tokens per round"
    assert said[1] == "llava-b: trained, 2.5 tokens per round"
    assert trainer.trained == [("llava-a", 5.0), ("llava-b", 5.0)]
    card = (tmp_path / "llava-a" / "README.md").read_text()
    assert "\nmmspec zoo train llava-a --minutes 5\n" in card
    assert "| loss curve | 2.0, - |" in card
    assert "| acceptance | caption 2.5, all 2.5 |" in card
    kept = json.loads((tmp_path / "llava-a" / "measured.json").read_text())
    assert kept["acceptance"] == {"caption": 2.5, "all": 2.5}
    assert main(given) == 1
    told = capsys.readouterr().err
    assert "llava-a was trained with budget_minutes=5.0, not 20.0; give --out" in " ".join(
        told.split()
    )
    assert main([*given, "--force", "--json"]) == 0
    assert [one["budget_minutes"] for one in json.loads(capsys.readouterr().out)] == [20.0, 20.0]
    assert trainer.trained[2:] == [("llava-a", 20.0), ("llava-b", 20.0)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("heads",), "give both heads and --all"),
        (("llava-drafter", "--all"), "give both heads and --all"),
        (("llava-drafter", "--target", "llava"), "give both heads and --all"),
        (("heads", "--all", "--target", "llava-drafter"), "is a draft model of llava"),
        (("heads", "--all", "--target", "llava", "--minutes", "0"), "--minutes 0 must be more"),
        (("heads", "--all", "--target", "llava", "--minutes", "nan"), "--minutes nan must be"),
        (("heads", "--all", "--target", "none"), "'none' is not in the zoo"),
        (("llava-chat-massv", "--minutes", "-1", "--out", "new"), "--minutes -1 must be more"),
        (("llava", "--minutes", "3", "--out", "new"), "llava is trained for a number of steps"),
    ],
)
def test_bad_values_get_one_error(
    given: tuple[str, ...],
    told: str,
    trainer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["zoo", "train", *given]) == 1
    assert told in " ".join(capsys.readouterr().err.split())
    assert not trainer.trained


def test_outside_a_checkout_the_error_names_the_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "__file__", str(tmp_path / "mmspec" / "zoo" / "training.py"))
    assert main(["zoo", "train", "heads", "--all", "--out", str(tmp_path / "new")]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "training the draft models of llava-chat needs the module tools.zoo.vlm" in told
    assert "not part of the installed package; run `mmspec zoo train` in a checkout" in told
    assert not (tmp_path / "new").exists()


def test_a_draft_model_that_names_its_recipe_is_preferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two heads of one kind; other recipes get the one that names none."""
    from mmspec import recipes
    from mmspec.zoo import catalogue

    own = zoo.path("llava-feature-head")
    entries = {
        "llava": zoo.info("llava"),
        "special": zoo.Entry(
            "special", "", "", "", "llava", sees="target-states", recipes=("hass",)
        ),
        "plain": zoo.Entry("plain", "", "", "", "llava", sees="target-states"),
    }
    monkeypatch.setattr(catalogue, "names", lambda: tuple(entries))
    monkeypatch.setattr(catalogue, "info", lambda name: entries[name.removeprefix("zoo:")])
    monkeypatch.setattr(catalogue, "path", lambda name: own)
    found = [catalogue.drafter_for("zoo:llava", recipes.get(one)) for one in ("hass", "eagle")]
    assert found == ["zoo:special", "zoo:plain"]
