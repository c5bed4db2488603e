"""Room on the interpreter's stack for the calls of a decoding loop.

CPython 3.11 and later keeps the frames of Python calls in chunks of 16 KiB. A call that does not
fit into the last one maps a new chunk, and unmaps it when it returns. Where a loop lies at the end
of a chunk, that adds some 15 microseconds to every call, as much as a small operation of torch
takes; whether it does depends on nothing but the depth and the locals of the callers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
_WORDS = 8192  # of 8 bytes: more than a chunk, and what is left of the new one is as much again


def reserve_stack(function: F) -> F:
    """Run a function in a chunk of its own, with about 60 KiB for the calls in it.

    Costs one mapping per call; without effect on interpreters that keep frames otherwise.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    if sys.implementation.name == "cpython" and sys.version_info >= (3, 11):
        code = call.__code__
        call.__code__ = code.replace(co_stacksize=code.co_stacksize + _WORDS)
    return cast(F, wraps(function)(call))
