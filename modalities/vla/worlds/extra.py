"""The packages of the extra [robot]."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def needed(package: str) -> ModuleType:
    """A package of the extra [robot]. Raises ValueError, naming the extra, where it is missing."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise ValueError(
            f"worlds of robots need {package}, which is not installed: pip install mmspec[robot]"
        ) from None
