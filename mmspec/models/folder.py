"""Inspect model folders without reading tensors, and without importing torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from mmspec.errors import check_is_file, parse_json

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
SETTINGS = ("config.json", "generation_config.json")  # a library may ignore damaged ones
TEXTS, MAX_TEXT_BYTES = (".json", ".jinja"), 64 << 20
# the largest value of a key that counts modules, which are made one by one
MODULE_COUNTS = {
    re.compile(r"(^|_)(layers?|blocks?|depths?)$"): 2000,
    re.compile(r"(^|_)(experts|heads|codebooks|labels|stages)$"): 100_000,
}
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as its library has it
_LENGTH = 8  # bytes of the header length of a safetensors file

Shape = tuple[int, ...]


def check_folder_exists(name: str, description: str = "model") -> None:
    """Refuse names of missing folders. Raises ValueError.

    A name with one slash is a hub name, unless its first part is a local folder.
    """
    path = Path(name)
    if path.is_file():
        raise ValueError(f"{name} is a file; give the folder of the {description}")
    is_folder = name.count("/") != 1 or name.startswith((".", "/", "~")) or path.parent.is_dir()
    if not name.strip() or (not path.exists() and is_folder):
        raise ValueError(
            f"there is no {description} folder {name or repr(name)}; give a folder, a hub name or "
            "zoo:NAME"
        )
    if path.is_dir():
        _check_files(path)


def _check_files(folder: Path) -> None:
    """Refuse pipes, text without end, damaged settings and absurdly many modules.

    Raises ValueError. Of a pipeline, the folders of its parts are checked, too.
    """
    parts = [one for one in folder.iterdir() if one.is_dir()]
    for home in (folder, *(parts if (folder / "model_index.json").is_file() else ())):
        for file in home.iterdir():
            if file.name in SETTINGS:
                check_module_counts(read_json(file), file)
            elif not file.is_dir():
                _check_size(file)


def check_module_counts(content: Mapping[str, Any], file: Path) -> None:
    """Refuse more layers, experts or others than any model has. Raises ValueError."""
    for name, value in _numbers(content):
        for pattern, most in MODULE_COUNTS.items():
            if value > most and pattern.search(name):
                raise ValueError(
                    f"{file} requires {name}={value}, and at most {most} are supported; copy it "
                    "again"
                )


def _numbers(content: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """All numbers in a configuration, those in lists included, with their keys."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                yield from _numbers(one)
            elif isinstance(one, int | float):
                yield name, one


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError naming the file where it is damaged or too large."""
    _check_size(file)
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged (not a JSON object); copy or download it again")
    return content


def _check_size(file: Path) -> None:
    check_is_file(file)
    if file.suffix in TEXTS and file.is_file() and file.stat().st_size > MAX_TEXT_BYTES:
        raise ValueError(f"{file} has more than {MAX_TEXT_BYTES >> 20} MiB; copy it again")


def read_shapes(folder: Path) -> dict[str, Shape]:
    """Return names and shapes of all weights in a folder, from safetensors headers.

    Raises ValueError for missing or pickled weights (unpickling runs code), for damaged or
    truncated files, and for an index that points out of the folder.
    """
    found: dict[str, Shape] = {}
    for file in find_weight_files(folder):
        found |= _shapes(file)
    return found


def find_weight_files(folder: Path) -> list[Path]:
    """Find the safetensors files of a model. Raises ValueError as `read_shapes`."""
    present = sorted(folder.glob("*.safetensors"))
    if not present:
        _refuse(folder)
    indices = sorted(folder.glob("*.safetensors.index.json"))
    single = [one for one in present if one.name in _WHOLE]
    if not indices or single:
        return single or present
    weights = read_json(indices[0]).get("weight_map")
    if not isinstance(weights, Mapping):
        raise ValueError(f"{indices[0]} has no weight_map; copy or download it again")
    names = sorted({str(name) for name in weights.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{indices[0]} points out of its folder ({name}); do not load it")
        if not (folder / name).is_file():
            raise ValueError(f"{indices[0]} names {name}, which is missing; copy it, too")
    series = {_SHARD.sub("", name) for name in names}
    unlisted = [
        one.name
        for one in present
        if one.name not in names and _SHARD.search(one.name) and _SHARD.sub("", one.name) in series
    ]
    if unlisted:
        raise ValueError(
            f"{indices[0]} lists {len(names)} of {len(names) + len(unlisted)} files of weights "
            f"(not {unlisted[0]}); it was cut, so copy or download it again"
        )
    return [folder / name for name in names]


_SHARD = re.compile(r"\d+(?=-of-\d+\.safetensors$)")
_WHOLE = ("model.safetensors", "diffusion_pytorch_model.safetensors")


def _refuse(folder: Path) -> None:
    """Raise ValueError with the reason why a folder without safetensors cannot be loaded."""
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
    """Read shapes from the header of a file and check its size. Raises ValueError."""
    check_is_file(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH), "little")
        if size < _LENGTH or length > min(size - _LENGTH, MAX_HEADER_BYTES):
            raise ValueError(f"{file} is empty or cut off ({size} bytes); copy it again")
        try:
            header = parse_json(stream.read(length))
            entries = {name: one for name, one in header.items() if name != "__metadata__"}
            ends = [int(one["data_offsets"][1]) for one in entries.values()]
            shapes = {name: tuple(map(int, one["shape"])) for name, one in entries.items()}
            for name, one in entries.items():
                _check_tensor_size(name, shapes[name], one)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({error}); copy it again") from error
    expected = _LENGTH + length + max(ends, default=0)
    if size != expected:
        raise ValueError(f"{file} has {size} of {expected} bytes; copy it again")
    return shapes


def _check_tensor_size(name: str, shape: Shape, entry: Mapping[str, Any]) -> None:
    """Check that the bytes of a tensor are those of its shape. Raises ValueError."""
    start, end = entry["data_offsets"]
    bits = re.search(r"\d+", entry["dtype"])  # F32, BF16, F8_E4M3, ...; BOOL has 8
    if prod(shape) * int(bits[0] if bits else 8) != 8 * (end - start):
        raise ValueError(f"{name} of shape {list(shape)} has {end - start} bytes")
