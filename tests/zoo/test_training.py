"""The shared training procedure never loses existing files."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mmspec import registry, zoo
from mmspec.modality import Modality
from mmspec.zoo.training import Trainer, save_on_exit
from tests import toys
from tools.zoo.diffusion import train as diffusion
from tools.zoo.image import low_resolution
from tools.zoo.image import train as image
from tools.zoo.mar import train as mar
from tools.zoo.speech.recognition import train as recognition
from tools.zoo.vlm import text
from tools.zoo.vlm import train as vlm

TRAINERS: tuple[Trainer, ...] = (  # mypy
    *(diffusion, image, low_resolution, mar, recognition, text, vlm),
)


@pytest.mark.parametrize("module", TRAINERS)
def test_every_checkpoint_has_a_plan(module: Any) -> None:
    entries = [zoo.info(name) for name in zoo.names()]
    assert {e.name for e in entries if import_module(e.trainer) is module} == set(module.PLANS)


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trainer of another package: a language model of its own, in no time."""
    made: Any = ModuleType("stranger")
    made.ABOUT, made.NOTES, made.HELD_OUT, made.stop, made.asked = "A stray.", "", 7, None, []

    def train(entry: Any, folder: Path, steps: Any, seed: int, progress: Any) -> dict[str, Any]:
        model = toys.model("llama", seed=int(torch.randint(1000, ())))
        with save_on_exit(lambda: model.save_pretrained(folder)):
            if made.stop is not None:
                raise made.stop
        return {"steps": steps or 9}

    def measure(entry: Any, folder: Path, count: int) -> dict[str, float]:
        made.asked.append(count)
        return {"charm": 0.5}

    made.train, made.measure = train, measure
    monkeypatch.setitem(sys.modules, "stranger", made)
    one = zoo.Entry("stray", "A stray model.", "stranger", "stranger")
    given = zoo.modality("llava").settings
    odd = Modality("odd", "tokens", "plain", given, "stranger", lambda _: False, (one,))
    monkeypatch.setattr(registry, "modalities", lambda: {"odd": odd})
    return made


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_run_is_described_in_the_report_and_in_the_card(stranger: Any, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    report = zoo.train("stray", folder, seed=3)
    assert {n: report[n] for n in ("name", "seed", "steps", "charm", "minutes")} == {
        **{"name": "stray", "seed": 3, "steps": 9},
        **{"charm": 0.5, "minutes": 0.0},
    }
    assert report["bytes"] == len(weights(folder))
    card = (folder / "README.md").read_text()
    assert card.startswith("# stray\n\nA stray model.\n\nA stray.\n")
    assert "mmspec zoo train stray\n" in card
    assert "| charm | 0.5 |" in card
    zoo.train("stray", tmp_path / "trial", steps=1)
    assert stranger.asked == [7, 2]  # a trial is measured on less


def test_weights_are_a_function_of_the_seed_and_leave_the_user_s_own_alone(
    stranger: Any, tmp_path: Path
) -> None:
    before = torch.random.get_rng_state()
    for run, seed in (("one", 5), ("two", 5), ("other", 6)):
        zoo.train("stray", tmp_path / run, seed=seed)
    assert torch.equal(before, torch.random.get_rng_state())
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    assert weights(tmp_path / "one") != weights(tmp_path / "other")


def test_a_checkpoint_is_overwritten_only_with_force(stranger: Any, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()  # empty: nothing can be lost
    zoo.train("stray", folder, seed=1)
    first = weights(folder)
    with pytest.raises(ValueError, match=r"stray is in .*new already; give --out .* --force"):
        zoo.train("stray", folder, seed=2)
    assert weights(folder) == first
    zoo.train("stray", folder, seed=2, force=True)
    assert weights(folder) != first
    assert {one.name for one in tmp_path.iterdir()} == {"new"}


@pytest.mark.parametrize("force", [False, True])
def test_what_others_wrote_is_never_overwritten(stranger: Any, tmp_path: Path, force: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds files other than stray; give an empty folder"):
        zoo.train("stray", tmp_path, force=force)
    assert {one.name for one in tmp_path.iterdir()} == {"config.json"}


@pytest.mark.parametrize("name", zoo.names())
def test_no_shipped_checkpoint_is_overwritten_without_force(name: str) -> None:
    before = zoo.path(name).stat().st_mtime_ns
    with pytest.raises(ValueError, match=f"{name} is in .* already"):
        zoo.train(name, steps=1)
    assert zoo.path(name).stat().st_mtime_ns == before


def test_a_run_that_fails_leaves_what_was_there_and_nothing_else(
    stranger: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    zoo.train("stray", folder, seed=1)
    first, stranger.stop = weights(folder), RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        zoo.train("stray", folder, seed=2, force=True)
    assert weights(folder) == first
    assert {one.name for one in tmp_path.iterdir()} == {"new"}


def test_an_interrupted_run_saves_its_weights(stranger: Any, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    zoo.train("stray", folder, seed=1)
    first, stranger.stop = weights(folder), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt, match=r"the weights so far are in .*new\.part"):
        zoo.train("stray", folder, seed=2, force=True)
    assert weights(folder) == first
    assert len(weights(tmp_path / "new.part")) == len(first)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("mar", "draw"),
        pytest.param("diffusion-drafter", "draw", marks=pytest.mark.slow),
        pytest.param("image-drafter", "follow", marks=pytest.mark.slow),
        pytest.param("image-sketch", "enlarge", marks=pytest.mark.slow),
        pytest.param("llava-text-drafter", "talk", marks=pytest.mark.slow),
    ],
)
def test_every_trainer_saves_an_interrupted_run(name: str, stage: str, tmp_path: Path) -> None:
    def stop(told: str, *_: Any) -> None:
        if told == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="the weights so far"):
        zoo.train(name, tmp_path / "new", steps=1, progress=stop)
    left = {one.name for one in zoo.path(name).rglob("*") if one.suffix != ".md"}
    assert {one.name for one in (tmp_path / "new.part").rglob("*")} == left
    assert not (tmp_path / "new").exists()
