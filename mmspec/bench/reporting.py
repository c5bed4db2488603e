"""What all measurements share: progress callbacks, reports, the environment, and a clock."""

from __future__ import annotations

import csv
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

Progress = Callable[[str, int, int], None]  # (stage, done, total)


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


class Report:
    """Base class of dataclasses of plain values."""

    def to_dict(self: Any) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)


class PointTable(Report):
    """A report with a list of `points`; `point.flat()` is one table row."""

    def write_csv(self: Any, file: Path) -> None:
        """Write one line per point."""
        rows = [point.flat() for point in self.points]
        columns = dict.fromkeys(name for row in rows for name in row)
        with file.open("w", newline="") as stream:
            lines = csv.DictWriter(stream, list(columns))
            lines.writeheader()
            lines.writerows(rows)


def describe_environment(device: torch.device, batch: int = 1) -> dict[str, Any]:
    """Return versions, device, threads and batch size, which every report includes."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "batch": batch,
    }


def describe_device(model: Any) -> dict[str, Any]:
    """Return the fields `device` and `environment` of a `Workload` for a model."""
    return {"device": model.device, "environment": {"dtype": dtype_name(model.dtype)}}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name: float32, bfloat16."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """Return the name of the accelerator or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"cpu ({platform.processor() or platform.machine()})"


def read_clock(device: torch.device) -> float:
    """Return the time in seconds, after all work queued on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of the accelerator, or of this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
