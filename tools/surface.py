"""Write `mmspec/_surface.pyi`: the calls that type checkers see on `mmspec.Accelerated`.

Which calls a model has is known when it is loaded. For type checkers `Accelerated` therefore has
the calls of all modalities, read from their classes; calls that differ between modalities return
Any. Run `python -m tools.surface` after a change to one of these classes; a test compares.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from mmspec import registry
from mmspec.accelerated import Accelerated

FILE = Path(__file__).resolve().parents[1] / "mmspec" / "_surface.pyi"


def interfaces() -> list[type[Accelerated]]:
    """The classes of the modalities in this package."""
    packages = {one.package for one in registry.modalities().values()}
    packages |= {package.rpartition(".")[0] for package in packages}
    ours = sorted(one for one in packages if one.startswith("mmspec.modalities."))
    modules = [f"{one}.accelerated" for one in ours if find_spec(f"{one}.accelerated")]
    found = [one for name in modules for one in vars(import_module(name)).values()]
    kinds = [one for one in found if isinstance(one, type) and issubclass(one, Accelerated)]
    return sorted({one for one in kinds if one is not Accelerated}, key=lambda one: one.__name__)


def signatures(name: str) -> set[str]:
    """The signatures of one method in all classes that have it, as a stub writes them."""
    return {_signature(vars(one)[name]) for one in interfaces() if name in vars(one)}


def _signature(method: Any) -> str:
    hints = get_type_hints(method)
    parts = [
        one.replace(annotation=hints.get(name, one.empty))
        for name, one in inspect.signature(method).parameters.items()
    ]
    made = inspect.Signature(parts, return_annotation=hints["return"])
    return re.sub(r"\bNoneType\b", "None", str(made).replace("typing.", ""))


def stub() -> str:
    """The text of the file."""
    public = {
        name
        for one in interfaces()
        for name, value in vars(one).items()
        if inspect.isfunction(value) and (not name.startswith("_") or name == "__call__")
    }
    lines, modules = [], set[str]()
    for name in sorted(public):
        found = signatures(name)
        one = found.pop() if len(found) == 1 else "(self, *args: Any, **arguments: Any) -> Any"
        modules |= {path.rpartition(".")[0] for path in re.findall(r"[a-z_]\w*(?:\.\w+)+", one)}
        lines.append(f"    def {name}{one}: ...")
    imports = "".join(f"import {name}\n" for name in sorted(modules))
    return (
        "# Made by `python -m tools.surface`; do not edit.\n"
        f"{imports}from typing import Any\n\n"
        "class Calls:\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    FILE.write_text(stub())
