"""`mmspec train` after kill -9 in any of its stages: the command ends with the same weights."""

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

from mmspec.training import feature_cache
from tests.cli.running import run

KILL = """
import os, signal, sys
from pathlib import Path
from mmspec.cli import main, train
from mmspec.training import checkpoints, feature_cache, head_trainer, responses

stage, rank = sys.argv[1], int(os.environ.get("RANK", "0"))
feature_cache.FeatureCache.__init__.__defaults__ = (20_000, 0)
calls = {"answers": 0, "features": 0, "checkpoint": 0}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def is_second(name):
    calls[name] += 1
    return stage == name and calls[name] == 2

append, save, step, replace = (
    responses._append, checkpoints.save_file, head_trainer.HeadTrainer.step, Path.replace
)

def append_half(file, new):
    append(file, new)
    if is_second("answers"):
        os.truncate(file, file.stat().st_size - 9)
        die()

def save_half(tensors, part, content):
    save(tensors, part, content)
    name = "features" if "features" in part.name else "checkpoint"
    if is_second(name):
        os.truncate(part, part.stat().st_size // 2)
        die()

def half_step(self, makers):
    if stage == "step" and self.num_steps_done == 3:
        next(iter(self.head.parameters())).data.fill_(7.0)
        die()
    return step(self, makers)

def replace_one(self, other):
    found = replace(self, other)
    if stage == "head" and Path(other).name == "config.json":
        die()
    return found

responses._append, checkpoints.save_file = append_half, save_half
head_trainer.HeadTrainer.step, Path.replace = half_step, replace_one
sys.exit(main(sys.argv[2:]))
"""
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def command(folder: Path, name: str) -> list[str]:
    asked = ["train", "eagle-2", "--target", "zoo:llava", "--data", str(folder / "asked.jsonl")]
    asked += ["--out", str(folder / name), "--cache", str(folder / f"{name}-cache"), "--seed", "3"]
    asked += ["--steps", "5", "--batch", "2", "--every", "2", "--held-out", "2", "--threads", "1"]
    asked += ["--accumulate", "2", "--max-new-tokens", "6", "--temperature", "0.7"]
    return [*asked, "--ema", "0.5", "--rate", "0.01"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data."""
    folder = tmp_path_factory.mktemp("killed")
    rows = [{"prompt": f"what is {n} and {n + 2}?"} for n in range(20)]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "killer.py").write_text(KILL)
    return folder


def kill(folder: Path, name: str, stage: str, *launch: str) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, *launch, str(folder / "killer.py"), stage, *command(folder, name)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(given, capture_output=True, text=True, env=env, timeout=300)


def resume(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, ...]:
    """History, answers and weights of a run that ends."""
    with pytest.MonkeyPatch.context() as patch:
        made = feature_cache.FeatureCache.__init__
        patch.setattr(made, "__defaults__", (20_000, 0))
        history = run(capsys, *command(folder, name))["history"]
    weights = load_file(folder / name / "model.safetensors")
    return history, (folder / name / "answers.jsonl").read_bytes(), weights


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["answers", "features", "step", "checkpoint", "head", "two"])
def test_the_weights_are_those_of_a_run_that_was_not_killed(
    stage: str, whole: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes, one of which is killed, are resumed by a single one."""
    if not expected:
        expected["all"] = resume(whole, "whole", capsys)
    if stage == "two":
        done = kill(whole, stage, "features", *LAUNCH)
        assert done.returncode != 0
        names = {one.name[:14] for one in (whole / "two-cache").glob("*.safetensors")}
        assert names == {"features-00000", "features-00001"}
    else:
        assert kill(whole, stage, stage).returncode == -9
    assert not (whole / stage / "model.safetensors").exists()
    assert (whole / stage / "checkpoint.safetensors").exists() is (
        stage in ("step", "checkpoint", "head")
    )
    found = resume(whole, stage, capsys)
    assert found[:2] == expected["all"][:2]
    ours, theirs = found[2], expected["all"][2]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not [*(whole / stage).glob(".mmspec-*")]
    assert not [one for one in (whole / f"{stage}-cache").iterdir() if one.suffix == ".part"]
