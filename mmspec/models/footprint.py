"""The memory that weights will take, and the memory that is free, before anything is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from mmspec.models.folder import Shape, find_weight_files, read_json, read_shapes
from mmspec.models.placement import GROUP, Placement
from mmspec.models.quantized_pipelines import find_denoisers

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of a container, which may have less than the machine
UNQUANTIZED = ("embed", "lm_head", "norm", "shared", "wte")  # parts of names


def weight_bytes(folder: Path, placement: Placement, dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights in a folder of a model or pipeline as they will be loaded.

    `dtype` is used where `placement` has none; None = as saved. Only headers are read. Raises
    ValueError as `mmspec.models.folder.read_shapes` does.
    """
    kind, quantize = placement.torch_dtype or dtype, placement.quantize
    index = folder / "model_index.json"
    if not index.is_file():
        return _folder_bytes(folder, quantize, kind)
    names = [name for name in read_json(index) if not name.startswith("_")]
    small = find_denoisers(names)
    return sum(
        _folder_bytes(folder / name, quantize if name in small else None, kind)
        for name in names
        if any((folder / name).glob("*.safetensors"))
    )


def _folder_bytes(folder: Path, quantize: str | None, dtype: torch.dtype | None) -> int:
    shapes = read_shapes(folder)
    count = sum(map(prod, shapes.values()))
    stored = sum(one.stat().st_size for one in find_weight_files(folder))
    each = stored / max(count, 1) if dtype is None else dtype.itemsize
    small = sum(map(prod, _quantized(shapes).values())) if quantize is not None else 0
    scales = 4 / GROUP
    bits = 4 if quantize in ("int4", "bnb-nf4") and torch.cuda.is_available() else 8
    return round((count - small) * each + small * (bits / 8 + scales))


def hub_bytes(name: str, placement: Placement) -> int | None:
    """Bytes of the weights of a model of the hub, from its headers there; None if unreachable."""
    from huggingface_hub import get_safetensors_metadata

    try:
        counts = get_safetensors_metadata(name).parameter_count
    except Exception:  # no connection, no such name, no safetensors: loading explains it
        return None
    kind = placement.torch_dtype
    sizes = {one: int(re.sub(r"\D", "", one.partition("_")[0]) or 8) / 8 for one in counts}
    each = 1 if placement.quantize is not None else None if kind is None else kind.itemsize
    return round(sum(count * (each or sizes[one]) for one, count in counts.items()))


def _quantized(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The weights of linear layers, by name and shape."""
    return {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == 2 and not any(part in name for part in UNQUANTIZED)
    }


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device, in bytes; None where it is unknown."""
    if device.type == "cpu":
        return _free_of_host()
    if device.type == "mps":
        used = torch.mps.driver_allocated_memory()
        return int(torch.mps.recommended_max_memory()) - int(used)
    library = getattr(torch, device.type, None)
    if library is None or not hasattr(library, "mem_get_info"):
        return None
    return int(library.mem_get_info(device)[0])


def _free_of_host() -> int | None:
    """Free memory of the host, or of the container if that is less."""
    found = [one for one in (_free_of_machine(), _free_of_container()) if one is not None]
    return min(found, default=None)


def _free_of_machine() -> int | None:
    if MEMINFO.is_file():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    if "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _free_of_container() -> int | None:
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if not (limit.is_file() and used.is_file()) or not limit.read_text().strip().isdecimal():
        return None
    cached = 0
    if (CGROUP / "memory.stat").is_file():
        lines = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        cached = int(lines.get("inactive_file", 0))  # given back under pressure
    return int(limit.read_text()) - int(used.read_text()) + cached


def check_memory(needs: Mapping[str, int], device: torch.device) -> None:
    """Check that the weights `needs`, bytes by model, fit on a device. Raises ValueError."""
    free = free_bytes(device)
    if free is None or sum(needs.values()) <= free:
        return
    names = " and ".join(f"{name} ({format_bytes(one)})" for name, one in needs.items())
    raise ValueError(
        f"{names} need {format_bytes(sum(needs.values()))} for weights, and {device} has "
        f"{format_bytes(free)} free; give a smaller --dtype, such as bfloat16, --quantize int8, "
        "another --device, or --device-map auto, which spreads over devices, memory and disk"
    )


def format_bytes(count: int) -> str:
    """A number of bytes with its unit."""
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.3g} MiB"
