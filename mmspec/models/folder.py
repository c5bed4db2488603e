"""What a model's folder holds, looked at without reading a tensor, and without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_LENGTH = 8  # bytes that say how long the header of a safetensors file is

Shape = tuple[int, ...]


def check_there(name: str, what: str = "model") -> None:
    """Refuse a folder that is meant and not there; other names may be of a hub. Raises ValueError.

    A name with one slash is of a hub, unless its first part is a folder here.
    """
    path = Path(name)
    if path.is_file():
        raise ValueError(f"{name} is a file; give the folder that the {what} lies in")
    is_folder = name.count("/") != 1 or name.startswith((".", "/", "~")) or path.parent.is_dir()
    if not name.strip() or (not path.exists() and is_folder):
        raise ValueError(
            f"there is no {what} folder {name or repr(name)}; give a folder, a hub name or zoo:NAME"
        )


def configuration(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the file where it is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged (it holds no object); copy or download it again")
    return content


def tensors(folder: Path) -> dict[str, Shape]:
    """Names and shapes of all weights in a folder.

    Raises ValueError where there are none, where they are pickled (unpickling runs code), where a
    file is damaged or cut off, and where an index points elsewhere.
    """
    found: dict[str, Shape] = {}
    for file in files(folder):
        found |= _shapes(file)
    return found


def files(folder: Path) -> list[Path]:
    """The safetensors files that make up a model. Raises ValueError as `tensors` does."""
    there = sorted(folder.glob("*.safetensors"))
    if not there:
        _refuse(folder)
    indices = sorted(folder.glob("*.safetensors.index.json"))
    single = [one for one in there if one.name in _WHOLE]
    if not indices or single:
        return single or there
    weights = configuration(indices[0]).get("weight_map")
    if not isinstance(weights, Mapping):
        raise ValueError(f"{indices[0]} has no weight_map; copy or download it again")
    names = sorted({str(name) for name in weights.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{indices[0]} points out of its folder ({name}); do not load it")
        if not (folder / name).is_file():
            raise ValueError(f"{indices[0]} names {name}, which is not there; copy it, too")
    return [folder / name for name in names]


_WHOLE = ("model.safetensors", "diffusion_pytorch_model.safetensors")


def _refuse(folder: Path) -> None:
    """Why a folder without safetensors cannot be loaded."""
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled:
        raise ValueError(
            f"{folder} holds pickled weights ({', '.join(pickled)}), and unpickling runs code; "
            "convert them with model.save_pretrained(folder), which writes safetensors, or with "
            "`mmspec convert` where the layout is published"
        )
    raise ValueError(
        f"{folder} has no weights; copy its files of type .safetensors, or save the model again"
    )


def _shapes(file: Path) -> dict[str, Shape]:
    """What the header of a file promises, if as many bytes follow. Raises ValueError else."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH), "little")
        if size < _LENGTH or length > size - _LENGTH:
            raise ValueError(f"{file} is empty or cut off ({size} bytes); copy it again")
        try:
            header = json.loads(opened.read(length))
            entries = {name: one for name, one in header.items() if name != "__metadata__"}
            ends = [int(one["data_offsets"][1]) for one in entries.values()]
            shapes = {name: tuple(map(int, one["shape"])) for name, one in entries.items()}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({error}); copy it again") from error
    wanted = _LENGTH + length + max(ends, default=0)
    if size != wanted:
        raise ValueError(f"{file} has {size} of {wanted} bytes; copy it again")
    return shapes
