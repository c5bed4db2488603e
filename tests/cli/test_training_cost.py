"""`mmspec train --dry-run`: figures from a configuration alone, and compared with a real run."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmspec import zoo
from mmspec.training.head_trainer import HeadTrainer
from tests.cli.running import fail, run

GIB = 2**30
TEXT = "what is at the top? a red circle. is it blue? the star is green."
WIDTH, LAYERS, INNER, VOCABULARY = 3584, 28, 18944, 152064
QWEN_7B: dict[str, Any] = {  # config.json of Qwen2.5-VL-7B-Instruct
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "max_position_embeddings": 128000,
    "num_attention_heads": 28,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": WIDTH,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
    },
}


def _command(target: str, folder: Path, *more: str) -> list[str]:
    rows = ({"prompt": TEXT, "answer": TEXT} for _ in range(12))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["train", "eagle-3", "--target", target, "--data", str(folder / "rows.jsonl")]
    return [*given, "--out", str(folder / "out"), *more]


@pytest.fixture
def qwen_7b(tmp_path: Path) -> str:
    """A folder with the configuration, a small tokenizer and no weights."""
    folder = tmp_path / "qwen"
    shutil.copytree(zoo.path("qwen2.5-vl"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return str(folder)


def test_a_plan_needs_a_configuration_alone(
    qwen_7b: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes are those that are computed by hand from the configuration."""
    how = ("--dry-run", "--accumulate", "8", "--batch", "4", "--devices")
    found = run(capsys, *_command(qwen_7b, tmp_path, *how, "4"))
    assert found["target parameters"] == 8_292_166_656  # as published: 8.29 billion
    target = 2 * 8_292_166_656 / GIB
    assert found["memory of the target, GiB"] == pytest.approx(target)
    attention = 2 * WIDTH * (WIDTH + 2 * 512) + WIDTH * WIDTH
    size = 3 * WIDTH * WIDTH + attention + 3 * WIDTH * INNER + 32_768 * WIDTH + 4 * WIDTH
    assert found["head parameters"] == size
    assert found["checkpoint, GiB"] == pytest.approx(12 * size / GIB)
    assert found["memory of the head, GiB"] == pytest.approx((16 + 8 + 2) * size / GIB)
    length = found["tokens of a prompt, mean and most"][1] + 128
    keys = 16 * length * 2 * LAYERS * 4 * 128 * 2  # 16 rows, 4 heads of 128 in bfloat16
    assert found["memory of the keys and values of answers, at most, GiB"] == keys / GIB
    on_each = found["memory per device, target on each, GiB"]
    use = found["memory of the head, GiB"] + found["memory of a batch, about, GiB"]
    assert on_each == pytest.approx(target + use)
    layer = 3 * WIDTH * INNER + 2 * WIDTH * (WIDTH + 512) + WIDTH + 2 * 512 + 2 * WIDTH
    split = (
        2 * (LAYERS * layer + WIDTH + 2 * VOCABULARY * WIDTH) / GIB
    )  # all but the vision encoder
    assert found["memory per device, target sharded, GiB"] == pytest.approx(
        use + target - split * 3 / 4
    )
    assert found["fit in 80 GiB, on each and sharded"] == [True, True]
    assert not (tmp_path / "out").exists()
    found = run(capsys, *_command(qwen_7b, tmp_path, *how, "8"))  # more than its heads
    problem = "num_attention_heads=28 cannot be shared by 8 processes"
    assert found["memory per device, target sharded, GiB"] == problem
    assert found["fit in 80 GiB, on each and sharded"] == [True, False]
    assert len(found["hours in all, on each and sharded"]) == 1


def test_hours_follow_the_assumptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "hours, target on each: answers, training, measuring"
    target, how = "zoo:qwen2.5-vl", ("--dry-run", "--accumulate", "4")
    one = run(capsys, *_command(target, tmp_path, *how))
    assert one["assumed"] == "tflops=400, memory_gbs=2000, link_gbs=200, device_gib=80"
    assume = "tflops=200,memory_gbs=1000,device_gib=1e-3"
    slow = run(capsys, *_command(target, tmp_path, *how, "--assume", assume))
    assert slow[name] == pytest.approx([2 * hours for hours in one[name]])
    assert slow["fit in 0.001 GiB, on each and sharded"] == [False, False]
    four = run(capsys, *_command(target, tmp_path, *how, "--devices", "4", "--answers", "data"))
    assert four[name][0] == 0
    assert one[name][1] / 4 < four[name][1] < one[name][1]


def test_a_plan_counts_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, how = "tokens per step, share of padding, about", ("--dry-run", "--batch", "8")
    command = _command("zoo:qwen2.5-vl", tmp_path, *how)
    long = {"prompt": f"{TEXT} {TEXT} {TEXT}"}
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(long) + "\n" for _ in range(3))
    plain = run(capsys, *command)
    packed = run(capsys, *command, "--pack", "512")
    assert packed[name][0] == plain[name][0]
    assert 0 <= packed[name][1] < plain[name][1]
    memory = "memory of a batch, about, GiB"
    assert packed[memory] == pytest.approx(plain[memory], rel=0.5)
    refused = fail(capsys, *command, "--pack", "512", "--set", "visual_keep=0.5")[1]
    assert "reads the target's attention over whole rows; drop --pack" in refused


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--devices", "2"), "--devices and --assume are of a plan; give --dry-run"),
        (("--dry-run", "--devices", "2"), "--accumulate 1 batches a step cannot be shared"),
        (("--dry-run", "--assume", "flops=1"), "'flops=1' is not a parameter of '--assume'"),
        (("--dry-run", "--assume", "tflops=0"), "--assume tflops=0 must be a number"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    assert message in fail(capsys, *_command("zoo:qwen2.5-vl", tmp_path, *more))[1]


class _LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations made and that are alive, and the most there were."""

    def __init__(self, existing: Iterator[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {one.untyped_storage()._cdata for one in existing}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in self.known:
                storage = one.untyped_storage()
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return made

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


@contextmanager
def _measured_step(number: int, found: list[int]) -> Iterator[None]:
    """Append the peak of one step, without weights and the optimizer's averages."""
    whole = HeadTrainer.step

    def step(self: HeadTrainer, examples: Any) -> float:
        if self.num_steps_done != number:
            return whole(self, examples)
        states = [one for each in self._optimisers() for one in each.state.values()]
        averages = (one for state in states for one in state.values())
        weights = (*self.head.state_dict().values(), *self.reader.model.state_dict().values())
        with _LiveBytes(iter([*weights, *averages])) as live:
            loss = whole(self, examples)
        found.append(live.peak)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadTrainer, "step", step)
        yield


def test_a_plan_is_what_a_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory of a step within a factor of 1.6, files within 5 percent."""
    how = ["--answers", "data", "--steps", "2", "--every", "2", "--held-out", "1"]
    how += ["--max-new-tokens", "20", "--batch", "8"]
    asked, peaks = _command("zoo:qwen2.5-vl", tmp_path, *how), list[int]()
    plan = run(capsys, *asked, "--dry-run")
    with _measured_step(1, peaks):
        run(capsys, *asked)
    gradients = 4 * plan["head parameters"]
    planned = plan["memory of a batch, about, GiB"] * GIB + gradients
    assert planned / 1.6 < peaks[0] < 1.6 * planned
    sizes = {one.name: one.stat().st_size for one in (tmp_path / "out").iterdir()}
    assert sizes["checkpoint.safetensors"] == pytest.approx(plan["checkpoint, GiB"] * GIB, rel=0.05)
    total = plan["disk, at most about, GiB"] * GIB
    assert total / 2 < sum(sizes.values()) < total
