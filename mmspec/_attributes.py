"""Attributes of packages and classes: lazy names, properties with a default, delegated properties.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    default_property = property
else:

    class default_property:
        """A property with a default, which a field or an attribute of the same name replaces.

        Unlike `property` it allows setting the attribute on an instance, and reading it from the
        class raises AttributeError, so that a dataclass does not take it for a field default.
        """

        def __init__(self, default):
            self.default, self.__doc__ = default, default.__doc__

        def __get__(self, part, owner):
            if part is None:
                raise AttributeError(
                    f"{self.default.__name__} is an attribute of instances of {owner.__name__}"
                )
            return self.default(part)


def delegate_to(path: str) -> Any:
    """A property read from a part of the object: `sees = delegate_to("inner.sees")`."""
    return property(attrgetter(path))


def attach_lazily(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names are loaded on first use (PEP 562).

    `homes` maps each name to its module; a module of the same name is returned itself. Type
    checkers read the imports of the package under TYPE_CHECKING.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(homes[name])
        return home if homes[name] == f"{package}.{name}" else getattr(home, name)

    return load, lambda: sorted(homes)
