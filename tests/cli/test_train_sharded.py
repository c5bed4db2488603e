"""`mmspec train --shard-target`: two processes that hold one target together."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmspec import zoo
from tests.cli.running import fail

LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
STATES = """
import sys, torch
import torch.distributed as dist
from accelerate import PartialState
import mmspec
from mmspec.targets.readers.attention_tap import is_sharded
from mmspec.training.sharding import sharding_options, whole_weight
from mmspec.models.compatibility import fingerprint, is_same_target
from mmspec.models.loading import load_causal
from mmspec.training.heads import TrainingExample, read_example

PartialState(cpu=True)
torch.manual_seed(0)
for folder in sys.argv[1:]:
    whole, part = load_causal(folder), load_causal(folder, **sharding_options(2))
    assert is_sharded(part) and not is_sharded(whole)
    count = lambda model: sum(
        (one.to_local() if is_sharded(model) and hasattr(one, "to_local") else one).numel()
        for one in model.parameters()
    )
    assert count(part) < 0.7 * count(whole)
    ids = torch.randint(5, 60, (2, 9))
    mask = torch.ones_like(ids)
    ids[1, :3] = mask[1, :3] = 0
    asked = {"input_ids": ids, "attention_mask": mask}
    fast = [mmspec.accelerate(model, "plain") for model in (whole, part)]
    said = [one.generate(**asked, max_new_tokens=7, do_sample=False).sequences for one in fast]
    assert torch.equal(*said)
    readers = [one.session.bound.backbone for one in fast]
    example = TrainingExample(asked, said[0][:, 9:])
    for tap in ("hidden", "layers:0,2"):
        read = [read_example(one, example, tap) for one in readers]
        pairs = [(one.next, one.prompt.features, one.prompt.embeds) for one in read]
        for one, other in zip(*pairs):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    states = [one.next.clone().requires_grad_() for one in read]
    for reader, own in zip(readers, states):
        reader.head(own).float().logsumexp(-1).sum().backward()
    torch.testing.assert_close(states[0].grad, states[1].grad, atol=1e-5, rtol=1e-4)
    for own in (read[1].next, read[1].prompt.features, states[1].grad):
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own.contiguous())
        assert torch.equal(*both)
    assert is_same_target(*map(fingerprint, readers))
    rows = [whole_weight(one.model, one.head.weight) for one in readers]
    assert torch.equal(*rows)
print("all the same")
"""


def launch(*given: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *given]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with an even number of heads, and data beside it."""
    folder = tmp_path_factory.mktemp("target")
    found = zoo.load("llava")
    config = copy.deepcopy(found.config)
    config.text_config.num_attention_heads = config.text_config.num_key_value_heads = 4
    config.text_config.head_dim = 8
    torch.manual_seed(0)
    type(found)(config).save_pretrained(folder / "llava")
    zoo.processor("llava").save_pretrained(folder / "llava")
    rows = [{"prompt": f"what is {n} and {n + 2}?"} for n in range(12)]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def command(target: Path, out: Path, recipe: str = "eagle-3") -> list[str]:
    asked = ["train", recipe, "--target", str(target / "llava"), "--data"]
    asked += [str(target / "asked.jsonl"), "--out", str(out), "--steps", "3", "--batch", "2"]
    asked += ["--every", "3", "--held-out", "2", "--max-new-tokens", "6", "--threads", "1"]
    return [*asked, "--cache", str(out.with_name(f"{out.name}-cache"))]


def history(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "training.json").read_text())["history"]
    return found


@pytest.mark.exhaustive
def test_a_sharded_target_trains_what_a_whole_one_trains(target: Path, tmp_path: Path) -> None:
    """Answers are the same; states, losses and weights are up to rounding."""
    one = launch("-m", "mmspec.cli", *command(target, tmp_path / "one"))
    assert one.returncode == 0, one.stderr[-2000:]
    two = launch(*LAUNCH, "mmspec.cli", *command(target, tmp_path / "two"), "--shard-target")
    assert two.returncode == 0, two.stderr[-3000:]
    answers = [(tmp_path / name / "answers.jsonl").read_bytes() for name in ("one", "two")]
    assert answers[0] == answers[1]
    assert [one.name for one in (tmp_path / "two-cache").iterdir()] == [
        "features-00000-00000.safetensors"
    ]
    ours, theirs = history(tmp_path / "one"), history(tmp_path / "two")
    assert ours[0] == theirs[0]
    assert ours[-1]["loss"] == pytest.approx(theirs[-1]["loss"], rel=1e-4)
    heads = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert heads[0].keys() == heads[1].keys()
    for name, weight in heads[0].items():
        torch.testing.assert_close(weight, heads[1][name], atol=1e-4, rtol=1e-3)


@pytest.mark.exhaustive
def test_what_needs_the_whole_target_is_refused(target: Path, tmp_path: Path) -> None:
    """Attention of a process is that of its heads; a cache is refused before for another reason."""
    given = command(target, tmp_path / "dream", "dream")
    done = launch(*LAUNCH, "mmspec.cli", *given[: given.index("--cache")], "--shard-target")
    assert done.returncode != 0
    assert "reads attention of a LlavaForConditionalGeneration, of which each" in done.stderr


@pytest.mark.exhaustive
def test_heads_are_not_split(target: Path, tmp_path: Path) -> None:
    given = command(target, tmp_path / "odd")
    given[3] = str(tmp_path / "llava")
    zoo.load("llava").save_pretrained(tmp_path / "llava")
    zoo.processor("llava").save_pretrained(tmp_path / "llava")
    done = launch(*LAUNCH, "mmspec.cli", *given, "--shard-target")
    assert done.returncode != 0
    assert "cannot be shared by 2 processes; launch a number that divides it" in done.stderr
    given[3] = "zoo:llava"
    done = launch(*LAUNCH, "mmspec.cli", *given, "--shard-target")
    assert "is not split over processes; drop --shard-target" in done.stderr
    assert not (tmp_path / "odd").exists()


@pytest.mark.exhaustive
def test_every_process_reads_the_same_states(target: Path, tmp_path: Path) -> None:
    """Also with tied embeddings, biases and norms of heads, and in the gradient of the output."""
    from transformers import (
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    tied = Qwen2Config(**sizes, tie_word_embeddings=True)
    Qwen2ForCausalLM(tied).save_pretrained(tmp_path / "qwen2")
    Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8)).save_pretrained(tmp_path / "qwen3")
    (tmp_path / "states.py").write_text(STATES)
    folders = [str(tmp_path / "qwen2"), str(tmp_path / "qwen3"), str(target / "llava")]
    done = launch(*LAUNCH[:-1], str(tmp_path / "states.py"), *folders)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all the same") == 2


def test_one_process_has_no_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    given = ["train", "eagle-3", "--target", "zoo:llava", "--data", "none.jsonl", "--shard-target"]
    line = fail(capsys, *given, "--out", str(tmp_path / "new"))[1]
    assert "--shard-target splits the target over several processes, and one was" in line
