"""Several processes take the steps of one: shares, gradients, who writes; and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmspec.training.processes import Processes

LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class TwoOfThem:
    """The first of two processes, the other of which has gradients of its own."""

    num_processes, process_index, is_main_process, device = 2, 0, True, torch.device("cpu")


def together(monkeypatch: pytest.MonkeyPatch, other: torch.Tensor) -> Processes:
    processes = Processes(TwoOfThem())
    monkeypatch.setattr(Processes, "_mean", lambda _, own: (own + other) / 2)
    return processes


def test_one_process_is_alone() -> None:
    processes = Processes.from_environment()
    layer = nn.Linear(2, 1)
    assert (processes.count, processes.is_first, processes.device) == (1, True, None)
    assert processes.share([1, 2, 3]) == [1, 2, 3]
    assert processes.gather("own") == ["own"]
    assert processes.average_gradients(list(layer.parameters()), 0.25) == 0.25
    assert layer.weight.grad is None


def test_gradients_are_averaged_and_none_stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has a gradient in both, the second in the other process, the third in neither."""
    learnt = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    learnt[0].grad = torch.tensor([1.0, 3.0])
    theirs = torch.tensor([3.0, 5.0, 2.0, 4.0, 0.0, 0.0, 0.5, 1.0, 1.0, 0.0])
    processes = together(monkeypatch, theirs)
    assert processes.average_gradients(learnt, 1.5) == 1.0
    assert learnt[0].grad.tolist() == [2.0, 4.0]
    assert learnt[1].grad is not None
    assert learnt[1].grad.tolist() == [1.0, 2.0]
    assert learnt[2].grad is None  # so that nothing decays which nobody taught


def test_shares_are_all_there_is() -> None:
    first, second = TwoOfThem(), TwoOfThem()
    second.process_index = 1
    both = [Processes(one).share([0, 1, 2, 3]) for one in (first, second)]
    assert both == [[0, 2], [1, 3]]


def test_without_accelerate_several_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ValueError, match=r"install mmspec\[train\]"):
        Processes.from_environment()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "asked.jsonl"
    texts = ("how many things are there?", "what do you see?", "describe the picture.")
    rows = [{"prompt": text, "answer": f"there is {n} thing."} for n in range(4) for text in texts]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def train(data: Path, out: Path, processes: int, *more: str) -> subprocess.CompletedProcess[str]:
    how = [*LAUNCH, "-m"] if processes > 1 else ["-m"]  # accelerate launches devices by that, too
    asked = ["train", "eagle-2", "--target", "zoo:llava", "--data", str(data), "--out", str(out)]
    sizes = ["--steps", "4", "--batch", "2", "--every", "2", "--held-out", "2", "--answers", "data"]
    command = [sys.executable, *how, "mmspec.cli", *asked, *sizes, "--threads", "1", *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)


def history(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "training.json").read_text())["history"]
    return found


def cached_rows(cache: Path) -> dict[str, torch.Tensor]:
    return {name: row for shard in cache.iterdir() for name, row in load_file(shard).items()}


@pytest.mark.exhaustive
def test_two_processes_learn_what_one_learns(data: Path, tmp_path: Path) -> None:
    for count in (1, 2):
        cache = ("--cache", str(tmp_path / f"cache-{count}"))
        done = train(data, tmp_path / str(count), count, "--accumulate", "2", *cache)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("acceptance length before") == 1  # one of them speaks
    one, two = (history(tmp_path / name) for name in ("1", "2"))
    assert one[0] == two[0]
    for mine, theirs in zip(one[1:], two[1:], strict=True):
        assert mine["step"] == theirs["step"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["acceptance"] == pytest.approx(theirs["acceptance"], rel=1e-2)
    assert len(one) == 3
    rows = [cached_rows(tmp_path / f"cache-{count}") for count in (1, 2)]
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(rows[1][name], row) for name, row in rows[0].items())
    assert len([*(tmp_path / "cache-2").iterdir()]) == 2  # a shard of each
    odd = train(data, tmp_path / "odd", 2, "--accumulate", "3")
    assert odd.returncode != 0
    assert "cannot be shared evenly by 2 processes; give a multiple of 2" in odd.stderr
