"""What runs by default of a cross is a true cover of it, and nothing of the cross is lost."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import covering


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


def test_of_a_cross_outside_the_default_run_the_cover_is_exhaustive_and_the_rest_slow() -> None:
    axes = ("ab", "cd", "ef")
    usual, rare = covering(*axes), covering(*axes, by_default=False)
    marks = {0: "exhaustive", 1: "slow"}
    for one, other in zip(usual, rare, strict=True):
        (mark,) = other.marks
        assert other.values == one.values
        assert mark.name == marks[len(one.marks)]
