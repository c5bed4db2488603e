"""Calls of a loop find room on the interpreter's stack, however deep their callers are."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from types import FunctionType

import pytest

from mmspec.accelerated import Accelerated
from mmspec.bench import timing
from mmspec.serving.engine import Engine
from mmspec.targets.call_stack import reserve_stack

CALLS = 400
CHUNK = 16 * 1024  # bytes


def leaf(value: int) -> int:
    return value


def loop() -> int:
    """Faults of memory pages while a leaf is called again and again: one for each mapped chunk."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for value in range(CALLS):
        leaf(value)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at_depth(depth: int, function: Callable[[], int]) -> int:
    return function() if depth == 0 else at_depth(depth - 1, function)


def count_slow_depths(function: Callable[[], int]) -> int:
    """At how many of 300 depths the calls of the loop map a chunk each."""
    return sum(at_depth(depth, function) >= CALLS for depth in range(300))


def test_a_loop_at_the_end_of_a_chunk_is_not_slower_with_room() -> None:
    assert count_slow_depths(reserve_stack(loop)) == 0
    if sys.version_info < (3, 14):  # later interpreters may keep a chunk
        assert count_slow_depths(loop) > 0


@pytest.mark.parametrize("function", [Accelerated._run, timing._time_request, Engine._work])
def test_what_runs_decoding_loops_has_room(function: FunctionType) -> None:
    assert 8 * function.__code__.co_stacksize > CHUNK or sys.implementation.name != "cpython"


def test_a_function_is_otherwise_as_it_was() -> None:
    @reserve_stack
    def divide(above: float, /, below: float = 2.0, *more: int, **named: int) -> object:
        """Divide."""
        return above / below, more, named

    assert divide(3.0) == (1.5, (), {})
    assert divide(3.0, 1.0, 4, five=5) == (3.0, (4,), {"five": 5})
    assert (divide.__name__, divide.__doc__) == ("divide", "Divide.")
    with pytest.raises(ZeroDivisionError):
        divide(1.0, 0.0)


def test_calls_with_room_may_call_each_other() -> None:
    @reserve_stack
    def count(left: int) -> int:
        return 0 if left == 0 else 1 + count(left - 1)

    assert count(100) == 100
