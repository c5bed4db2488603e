"""Properties with a default, for contracts that parts inherit, and those that a part answers."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    declared = property
else:

    class declared:
        """A property with a default; a field or an attribute of the same name takes its place.

        Unlike `property` it refuses no attribute of an instance, and it is no value of the class,
        which a dataclass would take for the default of its field of the same name.
        """

        def __init__(self, default):
            self.default, self.__doc__ = default, default.__doc__

        def __get__(self, part, owner):
            if part is None:
                raise AttributeError(
                    f"{self.default.__name__} is asked of an instance of {owner.__name__}"
                )
            return self.default(part)


def answered_by(path: str) -> Any:
    """A property that a part of an object answers: `sees = answered_by("inner.sees")`."""
    return property(attrgetter(path))
