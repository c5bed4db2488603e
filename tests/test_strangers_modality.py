"""A modality of another package: all that mmspec offers works on it, and nothing here names it.

`tests/toys/stranger` holds that package as pip would have installed it: Markov chains, whose every
distribution is known, with a draft chain. It is found by its entry points once the folder is on the
path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec import bench, recipes, registry, zoo
from mmspec.distributions.noise import KeyedNoise, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.unchecked import Unchecked
from tests.covering import covering
from tests.forks import run_forked

ROOT = Path(__file__).resolve().parents[1]
STRANGER = ROOT / "tests" / "toys" / "stranger"
PACKAGE = "markov_modality"
TABLE = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.4, 0.3], [0.2, 0.4, 0.4]])  # of zoo:weather
ASKED: dict[str, Any] = {"start": [0, 2], "days": 30}
COMMANDS = {
    "zoo list": "zoo list --json",
    "recipes": "recipes --modality markov --json",
    "show": "show markov-copy --json",
    "doctor": "doctor zoo:weather zoo:weather-drafter --json",
    "doctor, other": "doctor zoo:weather {other} --json",
    "generate": "generate --model zoo:weather --prompt 0 --days 9 --repeats 1 --json",
    "generate, wrong": "generate --model zoo:weather --prompt 7",
    "generate, foreign": "generate --model zoo:weather --prompt 0 --max-new-tokens 9",
    "bench": "bench --model zoo:weather --recipe all --prompts 3 --repeats 1 --json",
    "certify": "certify markov-copy --seeds 20 --samples 1000 --json",
    "zoo train": "zoo train weather-drafter --out {out} --steps 50 --json",
    "help": "generate --help",
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is on the path, and mmspec looks again."""
    monkeypatch.syspath_prepend(str(STRANGER))
    looked = (registry.modalities, recipes.modules, recipes._list_names, recipes._load)
    for one in looked:
        one.cache_clear()
    yield
    for one in looked:
        one.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def by_hand(table: Tensor, temperature: float = 1.0, seed: int = 0) -> Tensor:  # (B, 1 + days)
    """A walk without drafts, rounds or any part of the package."""
    rows = [[state] for state in ASKED["start"]]
    noise = KeyedNoise.from_seed(seed, len(rows), torch.device("cpu"))
    for day in range(1, ASKED["days"] + 1):
        gumbel = noise.shared_keys(torch.full((len(rows), 1), day)).gumbel(len(table))[:, 0]
        for row, own in zip(rows, gumbel, strict=True):
            scores = table[row[-1]].log()
            scores = scores / temperature + own if temperature else scores
            row.append(int(scores.argmax()))
    return torch.tensor(rows)


def weather(recipe: str | None = None, **parts: Any) -> mmspec.Accelerated:
    drafter = "zoo:weather-drafter" if recipe is None else None
    return mmspec.accelerate("zoo:weather", recipe, drafter=drafter, **parts)


@pytest.mark.parametrize(
    ("length", "temperature"), covering((1, 3, 6), (0.0, 0.6, 1.0), strength=1)
)
def test_a_seed_gives_the_walk_by_hand(length: int, temperature: float) -> None:
    for seed in range(5):
        expected = by_hand(TABLE, temperature, seed)
        model = zoo.load("weather")
        plainly = mmspec.decode_plain(model, **ASKED, temperature=temperature, seed=seed)
        assert torch.equal(plainly.states, expected)
        for fast in (weather(length=length), weather("markov-plain")):
            out = fast.generate(**ASKED, temperature=temperature, seed=seed)
            assert torch.equal(out.states, expected)
            assert out.stats.exact
            assert out.stats.fallback is None


def test_drafts_save_calls() -> None:
    both = (weather(), weather("markov-plain"))
    fast, plain = (one.generate(**ASKED, seed=0).stats for one in both)
    assert plain.target_calls == ASKED["days"]
    assert fast.target_calls < plain.target_calls / 1.5
    assert fast.num_new_tokens == plain.num_new_tokens == 2 * ASKED["days"]


def test_rounds_are_streamed() -> None:
    fast, rows, rounds = weather(), [[0], [2]], 0
    for kept in fast.stream(**ASKED, seed=4):
        rounds += 1
        for row, new in zip(rows, kept.tokens, strict=True):
            row.extend(new)
    assert torch.equal(torch.tensor(rows), by_hand(TABLE, seed=4))
    assert fast.last_stats is not None
    assert fast.last_stats.target_calls == rounds


def test_rows_keep_their_noise_in_another_batch() -> None:
    both = weather().generate(**ASKED, seed=1).states
    alone = weather().generate(start=[2], days=ASKED["days"], seed=1, row_ids=[1]).states
    assert torch.equal(alone, both[1:])


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    fast = weather(length=5)
    fast.save_pretrained(tmp_path)
    again = mmspec.load(tmp_path)
    ours, theirs = (one.generate(**ASKED, seed=2) for one in (fast, again))
    assert torch.equal(ours.states, theirs.states)
    assert ours.stats.per_step_accepted == theirs.stats.per_step_accepted
    assert again.recipe.name == "markov-copy"


def test_a_model_in_memory_belongs_to_it() -> None:
    model = zoo.load("weather")
    assert registry.find_modality(model).name == "markov"
    assert torch.allclose(model.table, TABLE)
    assert zoo.info("weather").drafter == "weather-drafter"
    small = type(model).random(3, seed=0)
    out = mmspec.accelerate(model, drafter=small).generate(**ASKED, seed=3)
    assert torch.equal(out.states, by_hand(TABLE, seed=3))


@dataclass(frozen=True)
class Claiming(Verifier):
    """Checks nothing, and says that nothing is lost."""

    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = Unchecked.kinds

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        return Unchecked().verify(draft, scores, noise)


def test_certificates_tell_right_from_wrong() -> None:
    asked = [{**ASKED, "temperature": 1.0}]
    right = bench.certify("markov-copy", weather(), asked, seeds=5, samples=500)
    assert (right.verdict, right.modality) == ("exact", "markov")
    wrong = replace(recipes.get("markov-copy"), verifier=Claiming())
    found = bench.certify(wrong, seeds=5, samples=500)
    assert found.verdict == "refuted"
    refuted = {check.name for check in found.checks if check.outcome == "refuted"}
    assert refuted == {"frequencies", "greedy equality"}


@pytest.mark.parametrize(
    ("parts", "asked", "message"),
    [
        ({}, {"start": [3]}, r"start=\[3\] are not states; give one per row, 0 to 2"),
        ({}, {"start": []}, "are not states"),
        ({}, {"start": [0], "days": 0}, "days=0 is too small; give at least 1"),
        (
            {},
            {"start": [0], "nights": 2},
            "unknown keyword nights for this modality.* known: start, days",
        ),
        ({}, {"days": 2}, "start is missing"),
        ({"tree": [2, 1]}, {}, "tree"),
        (
            {"recipe": "coupled"},
            {},
            "'coupled' decodes tokens, but a MarkovChain gives states; .* recipes for it: markov-",
        ),
        ({"drafter": "zoo:llava-drafter"}, {}, "holds no Markov chain"),
        ({"length": "entropy"}, {}, "fixed number of states"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    parts: dict[str, Any], asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate("zoo:weather", **{"drafter": "zoo:weather-drafter", **parts}).generate(
            **asked
        )


def test_a_chain_that_is_no_name_brings_no_drafter() -> None:
    chain = mmspec.zoo.load("weather")
    with pytest.raises(ValueError, match="'markov-copy' needs a draft chain; give drafter="):
        mmspec.accelerate(chain, "markov-copy")
    named = mmspec.accelerate("zoo:weather", "markov-copy")  # the zoo has one for it
    assert named.generate(start=[0]).stats.recipe == "markov-copy"


SCRIPT = """
import contextlib, io, json, sys
sys.path[:0] = {places!r}
from mmspec.cli import main
said = {{}}
for name, arguments in {commands!r}.items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    said[name] = [code, out.getvalue(), err.getvalue()]
json.dump(said, sys.stdout)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """What every command said, in a process of its own: options are made when it begins."""
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text('{"model_type": "llama"}')
    places = {"other": folder / "other", "out": folder / "out"}
    commands = {name: line.format(**places).split() for name, line in COMMANDS.items()}
    script = SCRIPT.format(places=[str(ROOT), str(STRANGER)], commands=commands)
    done = run_forked([script], "tests.toys", folder=folder)[script]
    assert done.status == 0, done.err
    return {name: tuple(found) for name, found in json.loads(done.out).items()}


def document(said: dict[str, tuple[int, str, str]], name: str) -> Any:
    code, out, err = said[name]
    assert code == 0, err
    return json.loads(out)


def test_the_zoo_lists_and_trains_its_checkpoints(said: dict[str, tuple[int, str, str]]) -> None:
    own = [one for one in document(said, "zoo list") if one["modality"] == "markov"]
    assert [(one["name"], one["kind"], one["present"]) for one in own] == [
        ("weather", "target", True),
        ("weather-drafter", "drafter", True),
    ]
    report = document(said, "zoo train")
    assert report["days"] == 50
    assert 0 < report["off"] < 0.5


def test_its_recipes_are_listed_and_shown(said: dict[str, tuple[int, str, str]]) -> None:
    rows = document(said, "recipes")
    assert [row["name"] for row in rows] == ["markov-copy", "markov-plain"]
    assert all(row["modality"] == ["markov"] for row in rows)
    assert document(said, "show")["summary"].startswith("A draft chain walks ahead")


def test_the_doctor_knows_pairs(said: dict[str, tuple[int, str, str]]) -> None:
    found = document(said, "doctor")
    assert not found["refused"]
    checks = {one["check"]: one for one in found["findings"]}
    assert (checks["states"]["target"], checks["states"]["drafter"]) == (3, 3)
    assert checks["recipes that fit with this draft model"]["target"] == "markov-copy"
    code, out, _ = said["doctor, other"]
    assert code == 1
    assert "holds no Markov chain" in json.loads(out)["reasons"][0]


def test_a_prompt_is_answered(said: dict[str, tuple[int, str, str]]) -> None:
    found = document(said, "generate")
    walk = [int(word) for word in found["text"].split()]
    assert walk[0] == 0
    assert len(walk) == 10
    assert found["states"] == [walk]
    assert found["recipe"] == "markov-copy"
    assert found["drafter"] == "zoo:weather-drafter"
    assert found["identical_to_plain"] is True
    assert found["calls"] < found["calls_plain"] == 9


def test_options_of_others_are_refused(said: dict[str, tuple[int, str, str]]) -> None:
    code, _, err = said["generate, wrong"]
    assert code == 1
    assert "--prompt '7' is not a state of this chain; give 0 to 2" in err
    code, _, err = said["generate, foreign"]
    assert code == 1
    assert "it has --days, --temperature, --length" in err
    assert "Of modality markov" in said["help"][1]


def test_races_are_run(said: dict[str, tuple[int, str, str]]) -> None:
    found = document(said, "bench")
    rows = {row["recipe"]: row for row in found["rows"]}  # the fastest first
    assert rows.keys() == {"plain", "markov-copy"}
    plain, copy = rows["plain"], rows["markov-copy"]
    assert copy["fewer_calls"] > 1.5
    assert copy["exact"]
    assert copy["speedup_over_plain"] > 0
    assert copy["qualities"] == plain["qualities"]  # the same walks
    assert -1.1 < copy["qualities"]["log likelihood"]["value"] < -0.5
    assert not found["left_out"]


def test_claims_are_certified(said: dict[str, tuple[int, str, str]]) -> None:
    found = document(said, "certify")
    assert found["verdict"] == "exact"
    assert found["modality"] == "markov"
    outcomes = {one["name"]: one["outcome"] for one in found["checks"]}
    assert outcomes == {
        "enumeration": "skipped",
        "frequencies": "passed",
        "greedy equality": "passed",
        "seeded equality": "passed",
    }


def test_without_its_package_nobody_knows_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mmspec.cli", "recipes", "--modality", "markov"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "modality 'markov' is not known" in done.stderr


def test_a_broken_package_is_one_line_on_the_command_line(tmp_path: Path) -> None:
    own = tmp_path / "touch-1.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: touch\nVersion: 1\n")
    (own / "entry_points.txt").write_text("[mmspec.modalities]\ntouch = touch_it:MODALITY\n")
    done = subprocess.run(
        [sys.executable, "-m", "mmspec.cli", "recipes"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "error: the entry point touch = touch_it:MODALITY of mmspec.modalities cannot be" in line
