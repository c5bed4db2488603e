"""Published layouts of weights, one file each, and how each becomes a folder that loads here.

The folder is the registry: a module here that has a `FORMAT` is a layout that `mmspec convert`
reads, by the module's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from mmspec.errors import unknown_message

HELPERS = ("published",)  # modules that are no layout


@dataclass(frozen=True)
class Format:
    """One layout.

    `files` say what each file holds, in their order; those in brackets may be left out. `options`
    are what no file says: a name, and what it is. `convert` gets files and options, and returns
    what `save_pretrained` writes as safetensors; it raises ValueError for names that are missing or
    not of the layout, and for options that do not fit the weights.
    """

    about: str
    files: tuple[str, ...]
    convert: Callable[[Sequence[Path], Mapping[str, Any]], Any]
    options: Mapping[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """All layouts."""
    return sorted(one.name for one in iter_modules(__path__) if one.name not in HELPERS)


def get(name: str) -> Format:
    """The layout of that name. Raises ValueError naming the nearest one."""
    if name not in names():
        near = get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"there is no format {name!r}{hint} known: {', '.join(names())}")
    found: Format = import_module(f"{__name__}.{name}").FORMAT
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
