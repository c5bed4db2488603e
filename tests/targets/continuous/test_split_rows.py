"""A window split over processes is the window of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mmspec
from mmspec.targets.continuous.split_rows import SplitDenoiser, SplitRows
from tests.drafters.denoising.toy_chains import Steep, denoiser
from tests.toys.pipelines import build_request, pipeline

LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SCRIPT = """
import os
import torch
import torch.distributed as dist
import mmspec
from mmspec.targets.continuous.split_rows import SplitRows
from mmspec.verifiers.tolerance_window import ToleranceWindow
from tests.toys.pipelines import build_request, pipeline

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


def sample(name, recipe, images, seed=3, **parts):
    fast = mmspec.accelerate(pipeline(name), recipe, **parts)
    request = {**build_request(name, images), "output_type": "latent"}
    out = torch.as_tensor(fast(**request, num_inference_steps=8, seed=seed)[0])
    return out, fast.last_stats


zero = {"verifier": ToleranceWindow(0.0)}
for name, width, images, recipe, more in (
    ("ddpm", 1, 1, "paradigms", {}),
    ("ddpm", 1, 1, "paradigms", zero),
    ("dit", 2, 2, "paradigms", {}),
    ("learned", 1, 1, "accelerated-diffusion-carried", {}),
):
    parts = {**more, "window": 5}
    one, whole = sample(name, recipe, images, max_rows=width, **parts)
    two, half = sample(name, recipe, images, max_rows=SplitRows(width), **parts)
    assert torch.equal(one, two), (name, recipe)
    assert whole.target_calls == half.target_calls
    assert 0.5 <= half.network_rows / whole.network_rows < 0.8, (half, whole)
    both = [torch.empty_like(two) for _ in range(2)]
    dist.all_gather(both, two.contiguous())
    assert torch.equal(*both)
    if more:
        assert torch.equal(two, sample(name, recipe, images, max_rows=width, window=1)[0])
    if recipe == "paradigms":
        shared, _ = sample(name, recipe, images, max_rows=SplitRows(), **parts)
        torch.testing.assert_close(shared, one, atol=1e-3, rtol=1e-3)
    print("equal:", name, recipe)
for seed, images in ((3 + rank, 1), (3, 1 + rank)):
    try:
        sample("ddpm", "paradigms", images, seed, max_rows=SplitRows(), window=5)
    except ValueError as error:
        assert "do not predict in the same states: process 0 has 1 at steps 0 to 0" in str(error)
        print("refused:", error)
if rank:
    os._exit(0)
try:
    sample("ddpm", "paradigms", 1, max_rows=SplitRows(), window=5)
except ConnectionError as error:
    print("ended:", error)
os._exit(0)
"""


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process."""
    place = (tmp_path / "group").as_uri()
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.exhaustive
def test_rows_are_split_only_in_a_group() -> None:
    with pytest.raises(ValueError, match="no process group was started; start the program by"):
        SplitRows()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("alone")
def test_a_group_of_one_computes_all_rows() -> None:
    pipe, found = pipeline("ddpm"), []
    for rows in (2, SplitRows(2)):
        fast: Any = mmspec.accelerate(pipe, "paradigms", window=3, max_rows=rows)
        image = fast(**build_request("ddpm"), num_inference_steps=5, seed=1, output_type="np")[0]
        found.append((torch.as_tensor(image), fast.last_stats.network_rows))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("alone")
def test_a_state_must_fit_into_a_forward() -> None:
    network = Steep(denoiser(5).kernel, width=2)
    target = SplitRows(3).target(network)
    assert isinstance(target.denoiser, SplitDenoiser)
    assert target.max_rows == 2  # whole states
    with pytest.raises(ValueError, match="max_rows=1 does not hold one state"):
        SplitRows(1).target(network)
    with pytest.raises(ValueError, match="max_rows=0 must be"):
        SplitRows(0)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("group", ["all", dist.GroupMember.NON_GROUP_MEMBER])
def test_a_group_has_this_process(group: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a group of torch\.distributed that has this"):
        SplitRows(group=group)
    assert SplitRows(group=dist.group.WORLD).size == 1


@pytest.mark.slow
def test_two_processes_compute_the_window_of_one(tmp_path: Path) -> None:
    """Bit for bit with one state per forward, up to rounding with half of a window; both ways of
    disagreeing, and a process that has ended, are errors in the other one."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    given = [sys.executable, *LAUNCH, "script.py"]
    done = subprocess.run(given, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [done.stdout.count(f"{word}:") for word in ("equal", "refused", "ended")]
    assert counts == [8, 4, 1], done.stdout + done.stderr
