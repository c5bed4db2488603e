"""Parts of other packages work from the command line with no other edit: heads and verifiers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mmspec import recipes, verifiers, zoo
from tests.forks import run_forked
from tests.toys.bigram_head import BigramHead

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(zoo.path("llava"))
SCRIPT = """
import sys
sys.path[:0] = {places!r}
from mmspec.cli import main
sys.exit(main({words!r}))
"""
POINTS = """
[mmspec.recipes]
bigram = tests.toys.recipes.bigram
[mmspec.verifiers]
top = mmspec.verifiers.rank_limit:RankLimit
"""
SHORT = ("--prompt", "what is it?", "--max-new-tokens", "6", "--repeats", "1")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "doctor": ("doctor", MODEL, "HEAD"),
    "generate": ("generate", "--model", MODEL, "--drafter", "HEAD", *SHORT),
    "verifier": ("generate", "--model", MODEL, "--recipe", "suffix", "--verifier", "top", *SHORT),
    "bench": ("bench", "--model", MODEL, "--recipe", "bigram", "--drafter", "HEAD", *SHORT),
    "certify": ("certify", "bigram", "--prompts", "1", "--seeds", "2", "--samples", "500"),
}

needs_zoo = pytest.mark.skipif(not zoo.is_present("llava"), reason="needs zoo:llava")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """The JSON document of every command, with a package that has a head and a verifier."""
    folder = tmp_path_factory.mktemp("package")
    package = folder / "bigram-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: bigram\nVersion: 1\n")
    (package / "entry_points.txt").write_text(POINTS)
    torch.manual_seed(0)
    size = json.loads((Path(MODEL) / "config.json").read_text())["text_config"]["vocab_size"]
    BigramHead(size).save_pretrained(folder / "head")
    places = [str(ROOT), str(folder)]
    scripts = {}
    for name, words in COMMANDS.items():
        given = [str(folder / "head") if word == "HEAD" else word for word in words]
        scripts[name] = SCRIPT.format(places=places, words=[*given, "--json"])
    done = run_forked([*scripts.values()], "tests.toys", folder=folder)
    for name, script in scripts.items():
        assert done[script].status == 0, f"{name}: {done[script].err}"
    return {name: json.loads(done[script].out) for name, script in scripts.items()}


@pytest.mark.exhaustive
@needs_zoo
def test_a_head_of_one_file_is_examined(documents: dict[str, dict[str, object]]) -> None:
    found = documents["doctor"]
    checks = {one["check"]: one for one in found["findings"]}  # type: ignore[attr-defined]
    assert not found["refused"]
    assert checks["model"]["drafter"] == "BigramHead"
    assert checks["recipes that fit with this draft model"]["target"] == "bigram"


@pytest.mark.exhaustive
@needs_zoo
def test_a_head_of_one_file_selects_its_recipe(documents: dict[str, dict[str, object]]) -> None:
    found = documents["generate"]
    assert found["recipe"] == "bigram"
    assert found["identical_to_plain"] is True


@pytest.mark.exhaustive
@needs_zoo
def test_a_head_of_one_file_is_measured(documents: dict[str, dict[str, object]]) -> None:
    rows = [row["recipe"] for row in documents["bench"]["rows"]]  # type: ignore[attr-defined]
    assert rows == ["plain", "bigram"]


@pytest.mark.exhaustive
@needs_zoo
def test_a_head_of_one_file_is_certified(documents: dict[str, dict[str, object]]) -> None:
    assert documents["certify"]["verdict"] == "exact"


@pytest.mark.exhaustive
@needs_zoo
def test_a_verifier_of_another_package_is_found(documents: dict[str, dict[str, object]]) -> None:
    assert documents["verifier"]["exact"] is False


NINE: tuple[str, ...] = (
    "coupled",
    "rejection",
    "block",
    "traversal",
    "sample-and-match",
    "greedy-multi-draft",
)
NINE += ("spechub", "k-seq", "multi-draw")


@pytest.mark.parametrize("name", verifiers.names())
def test_every_listed_verifier_is_built(name: str) -> None:
    assert verifiers.parse_verifier(name).kinds is not None


def test_the_verifiers_of_papers_are_listed() -> None:
    assert {*NINE, "rank-limit", "exact", "unchecked"} <= {*verifiers.names()}
    assert repr(verifiers.parse_verifier("rank-limit:ranks=7")).count("ranks=7") == 1


def test_an_unknown_verifier_is_refused_briefly() -> None:
    for name in ("coupledd", "recursive", "walk", "zzz"):
        with pytest.raises(ValueError, match="there is no verifier") as refusal:
            verifiers.parse_verifier(name)
        listed = str(refusal.value).partition(": ")[2].partition(";")[0]
        assert 0 < len(listed.split(", ")) <= 10
        assert "see mmspec.verifiers.names()" in str(refusal.value)
    with pytest.raises(ValueError, match="no default for epsilon, delta"):
        verifiers.parse_verifier("typical")


def test_recipes_of_a_package_are_kinds_too() -> None:
    from mmspec.draft_models import find_kinds

    kinds = {kind for name in recipes.names() for kind in recipes.get(name).draft_model}
    assert {*find_kinds()} == kinds
