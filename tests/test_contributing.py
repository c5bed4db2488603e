"""The files of the guide, written into a fresh checkout, run with its commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmspec import zoo
from tests.forks import run_forked

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CODE = ("mmspec", "modalities", "compressors", "verifiers", "tests")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "checkpoints", "*.egg-info")


def blocks() -> dict[str, str]:
    """The code of the guide, by the path in its first line."""
    found = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", GUIDE, re.DOTALL)
    assert len(found) == GUIDE.count("```python")
    return dict(found)


def commands(program: str) -> list[list[str]]:
    """The commands of one program in the guide that are about its own example files."""
    typed = [shlex.split(line) for line in re.findall(rf"`({program} [^`\n>]*)`", GUIDE)]
    examples = {"repeat-last", "top-rank:max_rank=3", *blocks()}
    return [words for words in typed if examples & set(words)]


def tail(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr)[-3000:]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree without its weights, and with the files of the guide."""
    tree = tmp_path_factory.mktemp("checkout")
    for name in CODE:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=LEFT_OUT)
    shutil.copy(ROOT / "pyproject.toml", tree)
    for shelf in ("compressors", "modalities", "verifiers"):  # no links in a source distribution
        if not (tree / "mmspec" / shelf).exists():
            (tree / "mmspec" / shelf).symlink_to(Path("..") / shelf)
    for path, code in blocks().items():
        if not path.startswith("tests/toys/stranger/"):
            assert not (tree / path).exists()
            (tree / path).write_text(f"# {path}\n{code}")
    return tree


def run(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python module in the checkout, which is the only mmspec that it sees."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.exhaustive
def test_the_tests_that_the_guide_names_pass(checkout: Path) -> None:
    """Of its rule, and of its recipe: greedy and seeded output are those of plain decoding."""
    named = commands("pytest")
    assert len(named) == 2
    files = [word for words in named for word in words if word.endswith(".py")]
    chosen = ["-k", "rank or repeat-last", *named[1][named[1].index("-m") :]]
    done = run(checkout, "pytest", "-n0", "-v", "-p", "no:cacheprovider", *files, *chosen)
    assert done.returncode == 0, tail(done)
    for test in (
        "test_greedy_acceptance_grows_with_the_rank",
        "test_a_recipe_says_what_it_is[repeat-last]",
        "test_every_exact_recipe[repeat-last-llava-ragged]",
        "test_every_coupled_recipe[repeat-last-ragged-settings1]",
    ):
        assert f"{test} PASSED" in done.stdout, tail(done)


def command(checkout: Path, name: str, *more: str) -> dict[str, Any]:
    """The JSON document of `mmspec NAME ...`, as in the guide, with further options."""
    (words,) = ([*words[1:], *more] for words in commands("mmspec") if words[1] == name)
    code = (
        f"import sys; sys.path.insert(0, {str(checkout)!r}); "
        f"from mmspec.cli import main; sys.exit(main({[*words, '--json']!r}))"
    )
    done = run_forked([code], "tests.toys", folder=checkout)[code]
    assert done.status == 0, (done.out + done.err)[-3000:]
    document: dict[str, Any] = json.loads(done.out)
    return document


@pytest.mark.exhaustive
def test_the_recipe_of_the_guide_is_shown(checkout: Path) -> None:
    shown = command(checkout, "show")
    assert shown["summary"].startswith("Repeat last: propose the last token again")
    assert shown["exact"]


@pytest.mark.exhaustive
@pytest.mark.skipif(not zoo.is_present("llava"), reason="needs zoo:llava")
def test_the_rule_of_the_guide_is_found_by_its_name(checkout: Path) -> None:
    model = ("--model", str(zoo.path("llava")), "--drafter", str(zoo.path("llava-drafter")))
    found = command(checkout, "generate", *model, "--max-new-tokens", "8", "--repeats", "1")
    assert found["recipe"] == "coupled"
    assert not found["exact"]


@pytest.mark.exhaustive
def test_the_recipe_of_the_guide_is_listed(checkout: Path) -> None:
    done = run(checkout, "mmspec.cli", "recipes", "--json")
    assert done.returncode == 0, tail(done)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["repeat-last"]["modality"] == rows["suffix"]["modality"]


@pytest.mark.slow
def test_the_recipe_of_the_guide_is_certified(checkout: Path) -> None:
    certificate = command(checkout, "certify")
    assert certificate["verdict"] == "exact"
    outcomes = {check["name"]: check["outcome"] for check in certificate["checks"]}
    assert outcomes["seeded equality"] == outcomes["greedy equality"] == "passed"


def test_files_of_the_guide_are_formatted() -> None:
    for path, code in blocks().items():
        if path.startswith("tests/toys/stranger/"):
            continue
        for words in (["format", "--check"], ["check"]):
            done = subprocess.run(
                ["ruff", *words, "--stdin-filename", path, "-"],
                input=code,
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{path}: {tail(done)}"


def test_the_modality_of_the_guide_is_the_stranger() -> None:
    shown = {path: code for path, code in blocks().items() if "/stranger/" in path}
    assert {Path(path).name for path in shown} == {"__init__.py", "session.py"}
    for path, code in shown.items():
        assert code in (ROOT / path).read_text(), path


def test_the_map_names_folders_that_there_are() -> None:
    (drawn,) = re.findall(r"\n\n```\n(mmspec/.*?)```", GUIDE, re.DOTALL)
    first = [line.split()[0] for line in drawn.splitlines()]
    listed = [word.rstrip("/") for word in first if word.endswith("/")]
    named = set(re.findall(r"(\w+)/", drawn))
    rooms = {
        path.name
        for folder in (ROOT / "mmspec", ROOT / "mmspec" / "drafters", ROOT / "modalities")
        for path in folder.iterdir()
        if (path / "__init__.py").is_file()
    }
    assert rooms <= named, rooms - named
    for name in listed:
        assert (ROOT / name).is_dir() or (ROOT / "mmspec" / name).is_dir(), name


@pytest.mark.parametrize("name", re.findall(r"`((?:tests|mmspec)/[\w/.-]+)`", GUIDE))
def test_files_that_the_guide_names_are_there(name: str) -> None:
    assert (ROOT / name).exists() or name in blocks()


def test_the_guide_stays_short() -> None:
    assert len(GUIDE.splitlines()) < 250
