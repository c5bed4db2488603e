"""Which cases of a cross every run tries; the others wait behind a mark."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[int, ...]  # places on the axes
Value = tuple[int, int]  # an axis, a place on it


def covering(*axes: Iterable[Any], strength: int = 2, by_default: bool = True) -> list[Any]:
    """All cases of a cross, for `pytest.mark.parametrize`.

    Enough of them run by default that every `strength` values of different axes meet in one of
    them (all pairs, unless said otherwise; 1 = each value once). If not all pairs do, those that
    are missing are for `-m exhaustive`; what is left is for `-m slow`. Which ones depends on the
    order of the axes alone. Without `by_default` nothing runs by default, but for `-m exhaustive`.
    """
    crossed = [[*axis] for axis in axes]
    sizes = [len(axis) for axis in crossed]
    chosen = _choose_cases(sizes, strength)
    paired = _choose_cases(sizes, 2) if by_default and strength < 2 else chosen

    def mark(case: Case) -> Any:
        if case in chosen and by_default:
            return ()
        return pytest.mark.exhaustive if case in paired else pytest.mark.slow

    return [
        pytest.param(
            *(axis[place] for axis, place in zip(crossed, case, strict=True)), marks=mark(case)
        )
        for case in product(*(range(len(axis)) for axis in crossed))
    ]


def exhaustive(values: Iterable[Any], default: Container[Any]) -> list[Any]:
    """All of `values`, for `parametrize`; those not in `default` under `-m exhaustive`.

    A value that is a `pytest.param` keeps its own marks.
    """
    mark, marked = pytest.mark.exhaustive, type(pytest.param())
    return [
        one if isinstance(one, marked) or one in default else pytest.param(one, marks=mark)
        for one in values
    ]


def limited(cases: Iterable[Any], most: int) -> list[Any]:
    """Cases that are alike, for `parametrize`: `most` of them by default, from first to last.

    The others run under `-m exhaustive`. A tuple has a value for each argument; a `pytest.param`
    with marks keeps them.
    """
    marked = type(pytest.param())
    found = [
        one
        if isinstance(one, marked)
        else pytest.param(*(one if isinstance(one, tuple) else (one,)))
        for one in cases
    ]
    default = [place for place, one in enumerate(found) if not one.marks]
    if most >= len(default):
        return found
    kept = {default[at * (len(default) - 1) // max(most - 1, 1)] for at in range(most)}
    return [
        one
        if one.marks or place in kept
        else pytest.param(*one.values, marks=pytest.mark.exhaustive, id=one.id)
        for place, one in enumerate(found)
    ]


def _choose_cases(sizes: Sequence[int], strength: int) -> set[Case]:
    """Greedy: the first meeting that is missing, completed by what misses most."""
    values = [[(axis, place) for place in range(size)] for axis, size in enumerate(sizes)]
    missing = {
        frozenset(met)
        for some in combinations(values, min(strength, len(sizes)))
        for met in product(*some)
    }
    chosen, used = set[Case](), dict.fromkeys((one for axis in values for one in axis), 0)
    while missing:
        made = dict(min(missing, key=sorted))
        for axis in set(range(len(sizes))) - {*made}:
            met = {*made.items()}
            made[axis] = max(
                range(sizes[axis]), key=partial(_worth, axis, met=met, missing=missing, used=used)
            )
        missing = {some for some in missing if not some <= {*made.items()}}
        chosen.add(tuple(made[axis] for axis in range(len(sizes))))
        for one in made.items():
            used[one] += 1
    return chosen


def _worth(
    axis: int, place: int, met: Set[Value], missing: Set[Set[Value]], used: Mapping[Value, int]
) -> tuple[int, int]:
    """How much is met for the first time by a value beside `met`; of equals the less used."""
    one = (axis, place)
    return sum(one in some and some - {one} <= met for some in missing), -used[one]
