"""Notice a user's function that keeps state between calls.

A logits processor is called on drafts that are dropped later, and a stopping criterion row by row,
so one that counts its calls or stores tokens would change the output. What a function holds are its
attributes, the variables of its closure and its default arguments. They may change in the first
call, which may prepare values, and not after it.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PrefixConstrainedLogitsProcessor

DEPTH = 4  # of nested containers and objects
MAX_VALUES = 500  # looked at per function, so that a large table costs little
MAX_BYTES = 4096  # of an array whose contents are compared
_PLAIN = (int, str, bytes, bool, type(None))


class StateWatch:
    """Compares what a function holds with what it held after its first call."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.state: Mapping[str, Any] | None = None

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """The result of `call`, which calls the function; the first time it is called twice.

        Raises ValueError if the results differ, or the state.
        """
        result = call()
        if self.state is None:
            self.check()
            again = call()
            if not bool(((result == again) | (result.isnan() & again.isnan())).all()):
                raise self._error("it answers the same input twice differently")
        self.check()
        return result

    def check(self) -> None:
        """Compare the state with the first one. Raises ValueError for a change."""
        now = describe_state(self.function)
        if self.state is None:
            self.state = now
        for name in now.keys() | self.state.keys():
            if now.get(name) != self.state.get(name):
                raise self._error(f"{name} changed")

    def _error(self, reason: str) -> ValueError:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return ValueError(
            f"{name} keeps state between calls ({reason}), and here it is also called on drafted "
            "tokens that are dropped, and row by row: compute its result from its arguments alone, "
            "or use model.generate()"
        )


def is_of_user(function: Any) -> bool:
    """Whether a processor or criterion, or a function that it calls, is not of transformers."""
    calls_own = isinstance(function, PrefixConstrainedLogitsProcessor)
    return calls_own or not type(function).__module__.startswith("transformers.")


def describe_state(function: Any) -> dict[str, Any]:
    """What a function holds, by name; equal as long as nothing changes."""
    budget = _Budget(MAX_VALUES)
    return {name: budget.describe(value, DEPTH) for name, value in _read_state(function).items()}


class _Budget:
    """The values that may still be looked at."""

    def __init__(self, left: int) -> None:
        self.left = left

    def describe(self, value: Any, depth: int) -> Any:
        self.left -= 1
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, float):
            return repr(value)  # NaN differs from itself
        if isinstance(value, Tensor):
            return id(value), None if value.is_inference() else value._version
        if isinstance(value, np.ndarray):
            return id(value), value.tobytes() if value.nbytes <= MAX_BYTES else None
        if isinstance(value, Mapping):
            return len(value), self._describe_all(value.items(), depth)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return len(value), self._describe_all(value, depth)
        if isinstance(value, nn.Module | type(torch)):
            return id(value)
        return id(value), self._describe_all(_read_state(value).items(), depth)

    def _describe_all(self, values: Iterable[Any], depth: int) -> list[Any]:
        found: list[Any] = []
        if depth:
            for value in values:
                if self.left <= 0:
                    break
                found.append(self.describe(value, depth - 1))
        return found


def _read_state(function: Any) -> Mapping[str, Any]:
    """The attributes of an object, or what a function holds."""
    if isinstance(function, partial):
        return {"func": function.func, "args": function.args, "keywords": function.keywords}
    if inspect.ismethod(function):
        return {"self": function.__self__}
    if not inspect.isfunction(function):
        return vars(function) if hasattr(function, "__dict__") else {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    captured = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    return {**captured, "defaults": function.__defaults__, **vars(function)}


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
