"""Digests of the files of a model, by which processes compare what they have loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from mmspec import zoo
from mmspec.models.folder import check_folder_exists
from mmspec.registry import ZOO

SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")


def digest_files(name: str) -> dict[str, str]:
    """SHA-256 of every file of a model, by its path in the folder; reads all weights once.

    Args:
        name: A folder, "zoo:NAME", or a hub name, whose snapshot is downloaded where it is not.

    Raises ValueError where there is no such folder.
    """
    folder = find_folder(name)
    files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES)
    found = {}
    for file in files:
        with file.open("rb") as opened:
            found[str(file.relative_to(folder))] = hashlib.file_digest(opened, "sha256").hexdigest()
    return found


def find_folder(name: str) -> Path:
    """The folder of a model on this machine. Raises ValueError where there is none."""
    if name.startswith(ZOO):
        return Path(zoo.path(name.removeprefix(ZOO)))
    check_folder_exists(name)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=[f"*{suffix}" for suffix in SUFFIXES]))


def check_same_files(name: str, expected: Mapping[str, str]) -> None:
    """Refuse a model whose files are not those of the digests. Raises ValueError."""
    found = digest_files(name)
    changed = sorted(file for file in {*found, *expected} if found.get(file) != expected.get(file))
    if changed:
        raise ValueError(
            f"{name} is another model than the one that was deployed: {', '.join(changed[:3])} "
            "changed; deploy again, so that all replicas load the same files"
        )
