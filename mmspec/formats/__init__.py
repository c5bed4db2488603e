"""Published weight formats, one module each, converted to folders that this package loads.

The folder is the registry: every module with a `FORMAT` is a format that `mmspec convert` reads and
`mmspec export` may write. Its name is the module's, with hyphens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from safetensors.torch import save_file

from mmspec._renamed import rename_attributes
from mmspec.errors import unknown_message

HELPERS = ("published", "head_files", "targets")  # modules that are not formats


@dataclass(frozen=True)
class Format:
    """A published format of weights.

    `files` describe the files in order; those in brackets are optional. `options` (name ->
    description) are settings that no file holds. `convert` takes files and options and returns a
    model; it raises ValueError for missing or unknown weight names, and for options that do not fit
    the weights. `export` takes a model and the name of its target and returns a
    `head_files.PublishedHead`; it raises ValueError for settings that the format cannot express.
    `targets` maps the architectures of targets to changes of weight names, see `targets`.
    """

    about: str
    files: tuple[str, ...]
    convert: Callable[[Sequence[Path], Mapping[str, Any]], Any]
    options: Mapping[str, str] = field(default_factory=dict)
    export: Callable[[Any, str | None], Any] | None = None
    targets: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)


def names() -> list[str]:
    """Names of all formats."""
    found = (one.name for one in iter_modules(__path__) if one.name not in HELPERS)
    return sorted(name.replace("_", "-") for name in found)


def get(name: str) -> Format:
    """Return a format by name. Raises ValueError naming the nearest known one."""
    if name not in names():
        near = get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"there is no format {name!r}{hint} known: {', '.join(names())}")
    found: Format = import_module(f"{__name__}.{name.replace('-', '_')}").FORMAT
    return found


def convert(name: str, files: Sequence[str | Path], **options: Any) -> Any:
    """Convert the files of a format into a model of this package.

    Raises ValueError for a wrong number of files, unknown options, and weights that do not fit.
    """
    found, paths = get(name), [Path(file) for file in files]
    required = len([one for one in found.files if not one.startswith("[")])
    if not required <= len(paths) <= len(found.files):
        raise ValueError(
            f"format {name} has the files {', '.join(found.files)}; {len(paths)} were given"
        )
    unknown = sorted(set(options) - set(found.options))
    if unknown:
        raise ValueError(unknown_message(unknown, found.options, f"format {name}"))
    return found.convert(paths, options)


def export(name: str, model: Any, folder: Path, target: str | None = None) -> Any:
    """Write a model in a format, as config.json and safetensors; return what was written.

    Raises ValueError for formats that can only be read, and for models that one cannot express.
    """
    found = get(name)
    if found.export is None:
        able = [one for one in names() if get(one).export is not None]
        raise ValueError(f"format {name} is only read; choose one of {', '.join(able)}")
    made = found.export(model, target)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(made.tensors), folder / made.file.name, {"format": "pt"})
    text = json.dumps({**made.config, "dtype": _dtype(made.tensors)}, indent=2)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")
    return made


def _dtype(tensors: Mapping[str, Any]) -> str:
    floats = [one.dtype for one in tensors.values() if one.is_floating_point()]
    return str(floats[0]).removeprefix("torch.")


__getattr__ = rename_attributes(__name__, {"converted": "convert", "exported": "export"})
