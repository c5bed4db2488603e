"""A target split over two processes decodes as the whole one: `tp_plan="auto"` under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import toys

LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from accelerate import PartialState
import mmspec
from mmspec.models.loading import load_causal
from mmspec.targets.readers.attention_tap import is_sharded
from mmspec.training.self_fed import new_eagle3
from mmspec.training.sharding import sharding_options

PartialState(cpu=True)
folder, small = sys.argv[1:]
whole, part = load_causal(folder), load_causal(folder, **sharding_options(2))
assert is_sharded(part) and not is_sharded(whole)
drafter = load_causal(small)  # every process holds it whole
torch.manual_seed(0)
ids = torch.randint(5, 60, (2, 9))
mask = torch.ones_like(ids)
ids[1, :3] = mask[1, :3] = 0
requests = [
    {"input_ids": ids[:1], "attention_mask": mask[:1]},
    {"input_ids": ids, "attention_mask": mask},
]
reader = mmspec.accelerate(whole, "plain").session.bound.backbone
head = new_eagle3(reader, torch.ones(reader.vocabulary), num_taps=1, tapped_layers=(1,))
plans = [
    ("plain", {}),
    ("prompt-lookup", {}),
    ("coupled", {"drafter": drafter}),
    ("dynamic-tree", {"drafter": drafter}),
    ("recursive-rejection", {"drafter": drafter}),
    ("eagle-3", {"drafter": head, "length": 3}),
]
for name, options in plans:
    for request in requests:
        for how in ({"do_sample": False}, {"temperature": 1.0, "seed": 3}):
            found = []
            for model in (whole, part):
                fast = mmspec.accelerate(model, name, **options)
                out = fast.generate(**request, max_new_tokens=12, **how)
                assert out.stats.fallback is None, (name, out.stats.fallback)
                found.append((out.sequences, out.stats.target_calls))
            assert torch.equal(found[0][0], found[1][0]), (name, how)
            assert found[0][1] == found[1][1], (name, how)
            both = [torch.empty_like(found[1][0]) for _ in range(2)]
            dist.all_gather(both, found[1][0].contiguous())
            assert torch.equal(*both), (name, how)
    print("equal:", name)
dist.barrier()
PartialState().destroy_process_group()
"""


@pytest.mark.slow
def test_every_process_decodes_the_tokens_of_the_whole_model(tmp_path: Path) -> None:
    """Greedy and seeded, one row and a ragged batch; the draft model is in every process."""
    for name, layers in (("target", 2), ("small", 1)):
        toys.model("llama", layers=layers).save_pretrained(tmp_path / name)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = [sys.executable, *LAUNCH, "script.py", "target", "small"]
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(given, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal:") == 12  # six recipes in two processes
