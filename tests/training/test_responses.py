"""Answers that several processes write: all of them once, whatever was interrupted."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmspec.training.conversations import Question
from mmspec.training.processes import Processes
from mmspec.training.responses import (
    Response,
    collect_responses,
    concatenate_tokens,
    digest_responses,
    read_responses,
)
from mmspec.training.turns import Turn
from tests.cli.test_train_recipe import _files_up_to

QUESTIONS = [Question((Turn("user", (f"q{n}",)),), (), None, f"rows:{n}", n) for n in range(11)]
BATCH = 3


class Target:
    """Answers of a target that depend on the batch, as those of padded batches do by rounding."""

    def __init__(self, ends_after: int | None = None) -> None:
        self.batches: list[list[int]] = []
        self.ends_after = ends_after

    def __call__(self, batches: Iterable[Sequence[tuple[int, Question]]]) -> Iterator[Any]:
        for batch in batches:
            if len(self.batches) == self.ends_after:
                raise KeyboardInterrupt
            numbers = [number for number, _ in batch]
            self.batches.append(numbers)
            yield [Response(one, 4, (sum(numbers), one)) for one in numbers]


def collect(file: Path, target: Target, processes: Processes | None = None) -> list[Response]:
    return collect_responses(file, QUESTIONS, target, BATCH, processes=processes)


def together(file: Path, targets: Sequence[Target], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each of several processes, here threads, returns."""
    gate = threading.Barrier(len(targets))
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: group.wait())
    found: list[Any] = [None] * len(targets)

    def run(index: int) -> None:
        state = SimpleNamespace(num_processes=len(targets), process_index=index)
        found[index] = collect(file, targets[index], Processes(state, gate))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(targets))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
    return found


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """The file of a single process that was not interrupted."""
    (tmp_path / "whole").mkdir()
    collect(tmp_path / "whole" / "answers.jsonl", Target())
    return (tmp_path / "whole" / "answers.jsonl").read_bytes()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_processes_share_the_batches_and_write_the_file_of_one(
    count: int, tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, targets = tmp_path / "answers.jsonl", [Target() for _ in range(count)]
    found = together(file, targets, monkeypatch)
    assert file.read_bytes() == whole
    assert found == [read_responses(file)] * count
    assert sorted(batch for one in targets for batch in one.batches) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10],
    ]
    assert {len(one.batches) for one in targets} <= {4 // count, -(-4 // count)}
    assert [one.name for one in tmp_path.glob("answers*")] == ["answers.jsonl"]


def test_other_numbers_of_processes_resume(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with three, in the middle of a line; batches that are not whole are made again."""
    file, lines = tmp_path / "answers.jsonl", whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]))
    (tmp_path / "answers-00001.jsonl").write_bytes(b"".join(lines[3:5]) + lines[5][:9])
    (tmp_path / "answers-00002.jsonl").write_bytes(b"".join(lines[6:9]))
    assert len(read_responses(file)) == 8
    targets = [Target(), Target()]
    together(file, targets, monkeypatch)
    assert [one.batches for one in targets] == [[[3, 4, 5]], [[9, 10]]]
    assert file.read_bytes() == whole


@pytest.mark.parametrize("cut", [0, 1, 40, 200, -1])
def test_a_file_that_was_cut_anywhere_is_completed(cut: int, tmp_path: Path, whole: bytes) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes(whole[:cut])
    assert [one.question for one in collect(file, Target())] == list(range(11))
    assert file.read_bytes() == whole
    again = Target()
    collect(file, again)
    assert again.batches == []


def test_an_interrupt_keeps_the_answers_that_exist(tmp_path: Path, whole: bytes) -> None:
    file = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        collect(file, Target(ends_after=2))
    assert len(read_responses(file)) == 2 * BATCH
    rest = Target()
    collect(file, rest)
    assert rest.batches == [[6, 7, 8], [9, 10]]
    assert file.read_bytes() == whole


def test_on_a_full_disk_answers_stay(tmp_path: Path, whole: bytes) -> None:
    """Also where the files of several processes are merged."""
    file, lines = tmp_path / "answers.jsonl", whole.splitlines(keepends=True)
    with _files_up_to(len(whole) // 2), pytest.raises(OSError, match="free some space on its disk"):
        collect(file, Target())
    kept = read_responses(file)
    assert len(kept) >= BATCH
    other = tmp_path / "answers-00001.jsonl"
    other.write_bytes(b"".join(lines[6:]))
    with _files_up_to(len(whole) // 2), pytest.raises(OSError, match="free some space on its disk"):
        collect(file, Target())
    assert len(read_responses(file)) >= len(kept) + 5
    assert not [*tmp_path.glob("*.part")]
    collect(file, Target())
    assert file.read_bytes() == whole


def test_digests_and_counts_are_of_all_tokens(tmp_path: Path) -> None:
    found = collect(tmp_path / "answers.jsonl", Target())
    pairs = [(one.question, tuple(one.tokens)) for one in found]
    assert digest_responses(found) == hashlib.sha256(repr(pairs).encode()).hexdigest()
    assert digest_responses([]) == hashlib.sha256(b"[]").hexdigest()
    assert concatenate_tokens(found).tolist() == [x for _, tokens in pairs for x in tokens]
    assert concatenate_tokens([]).shape == (0,)


@pytest.mark.parametrize("tokens", ["[1, 2.5]", "[99999999999]", '"ab"', "null", "[true, null]"])
def test_lines_that_are_no_answers_are_made_again(
    tokens: str, tmp_path: Path, whole: bytes
) -> None:
    file = tmp_path / "answers.jsonl"
    lines = whole.splitlines(keepends=True)
    lines[4] = f'{{"question": 4, "prompt": 4, "tokens": {tokens}, "skipped": null}}\n'.encode()
    file.write_bytes(b"".join(lines))
    target = Target()
    collect(file, target)
    assert target.batches == [[3, 4, 5]]
    assert file.read_bytes() == whole


SLOW = """
import sys, time, datetime, torch
from mmspec.cli import main, training_examples
torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
first, respond = torch.distributed.get_rank() == 0, training_examples.ResponseCollector.__call__
def answer(self, questions):
    time.sleep(9 if first else 0)  # beyond the limit of the process group
    return respond(self, questions)
def measure(*_):
    time.sleep(6)
    return 1.5
training_examples.ResponseCollector.__call__ = answer
from mmspec.cli import train
train.measure_acceptance = measure
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.exhaustive
def test_a_target_slower_than_the_limit_of_the_group(tmp_path: Path) -> None:
    """Neither answers nor measurements may take part in a collective operation."""
    rows = [{"prompt": f"what is {n}?", "answer": f"it is {n}."} for n in range(9)]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "slow.py").write_text(SLOW)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    asked = ["train", "eagle-2", "--target", "zoo:llava", "--data", str(tmp_path / "asked.jsonl")]
    asked += ["--out", str(tmp_path / "out"), "--steps", "2", "--batch", "2", "--every", "1"]
    asked += ["--accumulate", "2", "--max-new-tokens", "4", "--held-out", "1", "--threads", "1"]
    command = [sys.executable, *launch, str(tmp_path / "slow.py"), *asked]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(one) for one in (tmp_path / "out" / "answers.jsonl").open()]
    assert [one["question"] for one in answers] == list(range(9))
    assert (tmp_path / "out" / "model.safetensors").is_file()
