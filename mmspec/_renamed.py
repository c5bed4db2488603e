"""Old names of public modules, for one version: they warn and lead to the new ones.

Imports no torch. `install()` adds a finder for the old module names; `rename_attributes` gives a
module whose functions were renamed its `__getattr__`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DISTRIBUTIONS = ("categorical", "gaussian", "kernels", "noise", "repetition", "sampling")
# old module -> new module, and names that changed with it ("name", or "module:name")
MODULES: dict[str, tuple[str, Mapping[str, str]]] = {
    "mmspec.laws": ("mmspec.distributions", {"Law": "Distribution"}),
    "mmspec.laws.law": ("mmspec.distributions", {"Law": "Distribution"}),
    **{f"mmspec.laws.{one}": (f"mmspec.distributions.{one}", {}) for one in DISTRIBUTIONS},
    "mmspec.drafters.growth": (
        "mmspec.drafters.draft_model",
        {
            **{one: f"mmspec.drafters.shapes:{one}" for one in ("Chain", "Shape", "StaticTree")},
            "News": "DraftUpdate",
            "Nodes": "DraftNodes",
        },
    ),
    "mmspec.drafters.length": ("mmspec.drafters.lengths.length", {}),
    "mmspec.modalities.speech.resampling": ("mmspec.modalities.common.resampling", {}),
    "mmspec.modalities.speech.sound": ("mmspec.modalities.common.sound", {}),
    "mmspec.modalities.text": ("mmspec.modalities.common.text_generation", {}),
    "mmspec.modalities.vlm.verdict": ("mmspec.modalities.vlm.consensus", {}),
    "mmspec.verifiers.law": (
        "mmspec.verifiers.enumeration",
        {"law": "enumerate_emitted", "joint": "enumerate_joint", "acceptance": "expected_accepted"},
    ),
    "mmspec.verifiers.lantern_residuals": ("mmspec.verifiers.latent_neighbourhood", {}),
    "mmspec.zoo.reading": ("mmspec.zoo.scene_parser", {}),
}


def install() -> None:
    """Let old module names be imported."""
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.append(_Finder())


def rename_attributes(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module for attributes that were renamed."""

    def read(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return read


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of `MODULES`; it is the last of the finders, so new files come first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_package = name == "mmspec.laws"
        return ModuleSpec(name, self, is_package=is_package) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        new, names = MODULES[module.__name__]
        _warn(module.__name__, new)

        def read(name: str) -> Any:
            # `inspect` asks every loaded module for `__file__`, also while torch is imported.
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            home, _, own = names.get(name, name).rpartition(":")
            return getattr(import_module(home or new), own)

        module.__getattr__ = read  # type: ignore[method-assign]


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"{old} is now {new}; the old name works in this version only", FutureWarning, stacklevel=3
    )
