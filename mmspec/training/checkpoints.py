"""Checkpoints of a training: one safetensors file each, there whole or not at all.

What is not a tensor stands in the header of the file as JSON.
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

KEY = "mmspec"


def write(file: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Write a checkpoint in the place of an older one, which stays where this fails.

    Raises OSError naming the file, where the disk is full or it cannot be written.
    """
    part = file.with_name(f"{file.name}.part")
    own = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
    try:
        save_file(own, part, {KEY: json.dumps(content), "format": "pt"})
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(file)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise OSError(
            f"{file} cannot be written ({error}); free some space on its disk or choose another "
            "--out, and give the same command again: it goes on from the last checkpoint"
        ) from error


def read(
    file: Path, names: Collection[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write` wrote, or of the tensors these. Raises ValueError for a damaged file."""
    try:
        with safe_open(file, "pt") as opened:
            content = json.loads(opened.metadata()[KEY])
            wanted = list(opened.keys()) if names is None else names
            return {name: opened.get_tensor(name) for name in wanted}, content
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is no checkpoint that can be read ({error}); remove it to begin anew"
        ) from error


def write_text(file: Path, text: str) -> None:
    """Write a small file, whole or not at all. Raises OSError."""
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise
