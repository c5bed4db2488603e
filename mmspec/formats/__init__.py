"""Published layouts of weights, one file each, and how each becomes a folder that loads here.

The folder is the registry: a module here that has a `FORMAT` is a layout that `mmspec convert`
reads and `mmspec export` may write, by the module's name with hyphens.
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

from mmspec.errors import unknown_message

HELPERS = ("published", "head_files")  # modules that are no layout


@dataclass(frozen=True)
class Format:
    """One layout.

    `files` say what each file holds, in their order; those in brackets may be left out. `options`
    are what no file says: a name, and what it is. `convert` gets files and options, and returns
    what `save_pretrained` writes as safetensors; it raises ValueError for names that are missing or
    not of the layout, and for options that do not fit the weights. `export` gets a model and the
    name of its target, and returns what is written, a `head_files.PublishedHead`; it raises
    ValueError for what the layout has no word for.
    """

    about: str
    files: tuple[str, ...]
    convert: Callable[[Sequence[Path], Mapping[str, Any]], Any]
    options: Mapping[str, str] = field(default_factory=dict)
    export: Callable[[Any, str | None], Any] | None = None


def names() -> list[str]:
    """All layouts."""
    found = (one.name for one in iter_modules(__path__) if one.name not in HELPERS)
    return sorted(name.replace("_", "-") for name in found)


def get(name: str) -> Format:
    """The layout of that name. Raises ValueError naming the nearest one."""
    if name not in names():
        near = get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"there is no format {name!r}{hint} known: {', '.join(names())}")
    found: Format = import_module(f"{__name__}.{name.replace('-', '_')}").FORMAT
    return found


def converted(name: str, files: Sequence[str | Path], **options: Any) -> Any:
    """What files of a layout hold, as a model of this package.

    Raises ValueError for another number of files, unknown options, and weights that do not fit.
    """
    layout, paths = get(name), [Path(file) for file in files]
    least = len([one for one in layout.files if not one.startswith("[")])
    if not least <= len(paths) <= len(layout.files):
        raise ValueError(
            f"format {name} has the files {', '.join(layout.files)}; {len(paths)} were given"
        )
    unknown = sorted(set(options) - set(layout.options))
    if unknown:
        raise ValueError(unknown_message(unknown, layout.options, f"format {name}"))
    return layout.convert(paths, options)


def exported(name: str, model: Any, folder: Path, target: str | None = None) -> Any:
    """Write a model in a layout, as config.json and safetensors; returns what was written.

    Raises ValueError for layouts that are only read, and for what one cannot hold.
    """
    layout = get(name)
    if layout.export is None:
        able = [one for one in names() if get(one).export is not None]
        raise ValueError(f"format {name} is only read; choose one of {', '.join(able)}")
    made = layout.export(model, target)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(made.tensors), folder / made.file.name, {"format": "pt"})
    text = json.dumps({**made.config, "dtype": _dtype(made.tensors)}, indent=2)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")
    return made


def _dtype(tensors: Mapping[str, Any]) -> str:
    floats = [one.dtype for one in tensors.values() if one.is_floating_point()]
    return str(floats[0]).removeprefix("torch.")
