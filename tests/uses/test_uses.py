"""Wrong uses, made at random from a seed: none hangs, shows a traceback or goes through.

At most one error in twenty may leave out what is wrong or what to do. `requests` and
`constructions` make calls from Python, `commands` command lines; `judging` says what errors need.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch

from mmspec import zoo
from tests.toys.folders import copy_damaged, text_pair
from tests.uses import commands, constructions, requests
from tests.uses.judging import Judgement, judge, report

UNFIXABLE = 0.05  # share of errors that name no fix
SEED = int(os.environ.get("MMSPEC_USES_SEED", "17"))  # another seed makes another sample


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    text_pair(root)
    copy_damaged(root / "text", root)
    (root / "empty").mkdir()
    (root / "file").write_text("nothing")
    (root / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n123")
    return root


@pytest.fixture
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of the zoo are read once for all command lines."""
    monkeypatch.setattr(zoo, "load", cache(zoo.load))
    monkeypatch.setattr(zoo, "processor", cache(zoo.processor))


def calls(count: int, folders: Path) -> list[Judgement]:
    """So many wrong calls, without those that the library takes as well."""
    rng, found = Random(SEED), list[Judgement]()
    while len(found) < count:
        torch.manual_seed(0)
        is_request = rng.random() < 0.6
        use = requests.misuse(rng) if is_request else constructions.misuse(rng, folders)
        one = judge(use)
        found += [] if one is None else [one]
    return found


def lines(count: int, folders: Path, run: commands.Run = commands.in_process) -> list[Judgement]:
    rng = Random(SEED)
    return [commands.judge_command(*commands.line(rng, folders), run) for _ in range(count)]


def check(found: Sequence[Judgement]) -> None:
    fates = Counter(one.fate for one in found)
    text = report(found)
    assert not {"accepted", "endless", "traceback"} & set(fates), text
    assert fates["no fix"] <= UNFIXABLE * len(found), text


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_wrong_calls_are_refused_with_a_fix(count: int, folders: Path) -> None:
    check(calls(count, folders))


@pytest.mark.usefixtures("_read_once")
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_wrong_command_lines_are_refused_with_a_fix(
    count: int, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders / "empty")
    check(lines(count, folders))


@pytest.mark.slow
def test_wrong_command_lines_of_real_processes(folders: Path) -> None:
    def run(words: Sequence[str]) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "mmspec.cli", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ}, timeout=120
        )
        return done.returncode, done.stdout, done.stderr

    check(lines(12, folders, run))
