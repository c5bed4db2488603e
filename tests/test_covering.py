"""What runs by default of a cross is a true cover of it, and nothing of the cross is lost."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import covering, exhaustive, limited


@pytest.mark.parametrize("sizes", [(4,), (3, 2), (1, 5), (7, 3, 2), (4, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("strength", [1, 2, 3])
def test_all_meet_by_default(sizes: tuple[int, ...], strength: int) -> None:
    axes = [[f"{axis}{place}" for place in range(size)] for axis, size in enumerate(sizes)]
    cases = covering(*axes, strength=strength)
    assert sorted(case.values for case in cases) == sorted(product(*axes))
    chosen = [case.values for case in cases if not case.marks]
    some = min(strength, len(axes))
    for places in combinations(range(len(axes)), some):
        met = {tuple(case[place] for place in places) for case in chosen}
        assert met == {*product(*(axes[place] for place in places))}
    if some < len(axes) and min(sizes) > 1:
        assert len(chosen) < len(cases)
    if some == 1:
        assert len(chosen) == max(sizes)


@pytest.mark.parametrize("by_default", [False, True])
@pytest.mark.parametrize("strength", [1, 2])
def test_pairs_are_exhaustive_and_the_rest_is_slow(strength: int, by_default: bool) -> None:
    axes = ("abc", "de", "fghi", "jk")
    cases = covering(*axes, strength=strength, by_default=by_default)
    marked: dict[str, set[tuple[str, ...]]] = {"": set(), "exhaustive": set(), "slow": set()}
    for case in cases:
        marked["".join(mark.name for mark in case.marks)].add(case.values)
    assert bool(marked[""]) is by_default
    assert bool(marked["exhaustive"]) is (strength == 1 or not by_default)
    found = marked[""] | marked["exhaustive"]
    for first, second in combinations(range(len(axes)), 2):
        met = {(case[first], case[second]) for case in found}
        is_met = met == {*product(axes[first], axes[second])}
        assert is_met or (strength == 1 and not by_default)
    assert marked["slow"]


def test_values_with_marks_of_their_own_keep_them() -> None:
    slow = pytest.param("c", marks=pytest.mark.slow)
    found = exhaustive(["a", "b", slow], {"a"})
    assert found[0] == "a"
    assert found[1].values == ("b",)
    assert [mark.name for mark in found[1].marks] == ["exhaustive"]
    assert found[2] is slow


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_at_most_so_many_run_by_default_and_the_others_are_exhaustive(most: int) -> None:
    slow = pytest.param(5, "f", marks=pytest.mark.slow)
    cases = [*enumerate("abcde"), slow]
    found = limited(cases, most)
    assert [one.values for one in found] == [*enumerate("abcde"), (5, "f")]
    assert found[-1] is slow
    marks = ["".join(mark.name for mark in one.marks) for one in found[:-1]]
    assert marks.count("") == min(most, 5)
    assert {*marks} <= {"", "exhaustive"}
    assert marks[0] == ""
    assert most == 1 or marks[-1] == ""


def test_single_values_are_limited_too() -> None:
    found = limited(["a", "b", "c"], 2)
    assert [one.values for one in found] == [("a",), ("b",), ("c",)]
    assert [bool(one.marks) for one in found] == [False, True, False]
