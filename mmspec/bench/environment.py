"""Where a measurement was made, and a clock that waits for the device."""

from __future__ import annotations

import platform
import resource
import sys
from time import perf_counter
from typing import Any

import torch
import transformers


def environment(device: torch.device, batch: int = 1) -> dict[str, Any]:
    """What a figure depends on besides the method; goes with every report."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "batch": batch,
    }


def placed(model: Any) -> dict[str, Any]:
    """What a `Workload` says of where a model runs: its `device` and `environment`."""
    return {"device": model.device, "environment": {"dtype": dtype_name(model.dtype)}}


def dtype_name(dtype: torch.dtype) -> str:
    """As users write it: float32, bfloat16."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """The accelerator's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"cpu ({platform.processor() or platform.machine()})"


def seconds(device: torch.device) -> float:
    """The time, once everything sent to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: of the accelerator, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
