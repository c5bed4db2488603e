"""Checkpoints of a training: one safetensors file each, written atomically.

Other values than tensors are JSON in the header of the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmspec.errors import check_is_file, parse_json

KEY = "mmspec"


def write(file: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically, replacing an older one.

    Raises OSError naming the file, where it cannot be written.
    """
    part = file.with_name(f"{file.name}.part")
    own = {name: one.detach().cpu().contiguous() for name, one in tensors.items()}
    shared: set[int] = set()
    for name, one in own.items():  # safetensors refuses two tensors in one storage
        if (start := one.untyped_storage().data_ptr()) in shared:
            own[name] = one.clone()
        shared.add(start)
    try:
        save_file(own, part, {KEY: json.dumps(content), "format": "pt"})
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.replace(file)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise OSError(
            f"{file} cannot be written ({error}); free some space on its disk or choose another "
            "--out, and repeat the command: it resumes from the last checkpoint"
        ) from error


def read(
    file: Path, names: Collection[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint, or only some of its tensors. Raises ValueError for a damaged file."""
    try:
        check_is_file(file)
        with safe_open(file, "pt") as stored:
            content = parse_json(stored.metadata()[KEY])
            selected = list(stored.keys()) if names is None else names
            return {name: stored.get_tensor(name) for name in selected}, content
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is not a readable checkpoint ({error}); remove it to start again"
        ) from error


def write_text(file: Path, text: str) -> None:
    """Write a small text file atomically. Raises OSError."""
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise
