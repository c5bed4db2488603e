"""Checks of arguments: what passes, and messages with the value, the rule and the fix."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmspec
from mmspec import errors, recipes
from tests.toys.pipelines import pipeline


@pytest.mark.parametrize(
    ("value", "whole", "passes"),
    [
        (3, True, True),
        (np.int64(3), True, True),
        (3.0, True, False),
        (True, True, False),
        (0.5, False, True),
        (True, False, False),
        (math.nan, False, False),
        (math.inf, False, False),
        ("3", False, False),
        (None, False, False),
    ],
)
def test_numbers_are_finite_and_no_bools(value: Any, whole: bool, passes: bool) -> None:
    if passes:
        errors.check_number("k", value, whole=whole)
        return
    with pytest.raises(ValueError, match=r"^k=.* must be a (whole )?number; give one, such as 1$"):
        errors.check_number("k", value, whole=whole)


def test_limits_belong_to_the_range() -> None:
    for value in (1, 4):
        errors.check_number("k", value, 1, 4)
    for value in (0, 5):
        with pytest.raises(ValueError, match="of at least 1 and at most 4; give one, such as 2"):
            errors.check_number("k", value, 1, 4, example=2)


def test_unknown_keywords_are_compared_with_the_known_ones() -> None:
    message = errors.unknown_message(["temprature"], ["seed", "temperature"], "generate")
    assert "did you mean 'temperature'?" in message
    assert message.endswith("known: seed, temperature")
    assert "did you mean" not in errors.unknown_message(["zzz"], ["seed"], "generate")


def test_an_option_is_a_name_or_a_part() -> None:
    known = {"one": np.float32(1), "list": [2]}
    assert errors.choose_option("part", "list", known) == [2]
    assert errors.choose_option("part", [5], known) == [5]
    with pytest.raises(ValueError, match=r"part='two' is not known; choose one of one, list"):
        errors.choose_option("part", "two", known)


@pytest.mark.parametrize(
    ("usual", "good", "bad"),
    [
        (True, False, 1),
        (4, 0, -1),
        (4, 7, 2.5),
        (0.5, math.inf, math.nan),
        (0.5, -3, "x"),
        ("name", object.__new__(type("Part", (), {})), 3),
        ([1], (2, 3), 1),
        (None, object(), None),
    ],
)
def test_options_have_the_type_of_their_default(usual: Any, good: Any, bad: Any) -> None:
    errors.check_same_kind("k", good, usual)
    if bad is not None:
        with pytest.raises(ValueError, match=r"k=.*give one"):
            errors.check_same_kind("k", bad, usual)


@pytest.mark.parametrize(
    ("value", "least", "message"),
    [
        (2.5, 1, "k=2.5 must be a whole number of at least 1; give one, such as 4"),
        ("x", 1, "k='x' must be a whole number of at least 1"),
        (-1, 1, "k=-1 must be a whole number of at least 1"),
        (2.5, None, "k=2.5 must be a whole number; give one"),
        (-1, None, "k=-1 must be a whole number of at least 0"),
    ],
)
def test_a_whole_option_is_refused_with_its_own_bound(
    value: Any, least: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        errors.check_same_kind("k", value, 4, least)


def test_recipes_name_the_bounds_of_options_that_they_have() -> None:
    for name in recipes.names():
        plan = recipes.get(name)
        assert all(plan.options[one] >= least for one, least in plan.least.items()), name
    with pytest.raises(ValueError, match=r"interval=2\.5 must be a whole number of at least 1;"):
        mmspec.accelerate(pipeline("ddpm"), "taylorseer", interval=2.5)


def test_an_existing_path_is_one_value(tmp_path: Path) -> None:
    """Whatever commas and names it holds; a path that does not exist is split."""
    known = {"head": None, "keep": 0.5, "name": "a"}
    for name in ("a,keep=1", "a,name=b,keep=2", "a,b"):
        given = f"head={tmp_path / name},keep=0.25"
        if name != "a,b":
            assert errors.parse_parameters(given, known, "x") != {
                "head": str(tmp_path / name),
                "keep": 0.25,
            }
        (tmp_path / name).touch()
        found = errors.parse_parameters(given, known, "x")
        assert found == {"head": str(tmp_path / name), "keep": 0.25}


def test_parameters_are_parsed_by_the_type_of_their_default() -> None:
    known = {"keep": 0.5, "rows": 2, "name": "a"}
    assert errors.parse_parameters("", known, "x") == {}
    found = errors.parse_parameters("keep=1,rows=3,name=b", known, "x")
    assert found == {"keep": 1, "rows": 3, "name": "b"}
    for text, says in (
        ("size=1", "it has keep=0.5, rows=2, name=a"),
        ("rows=1.5", "gives no int"),
        ("keep=x", "gives no float"),
        ("rows", "is not a parameter"),
    ):
        with pytest.raises(ValueError, match=says):
            errors.parse_parameters(text, known, "x")


def test_long_values_and_tensors_are_shortened() -> None:
    assert errors.format_value(torch.zeros(2, 3)) == "float32 (2, 3)"
    assert errors.format_value([1]) == "[1]"
    assert len(errors.format_value("x" * 900)) == 60
    message = errors.library_message(RuntimeError("y" * 5000), "generate()", {"a": torch.ones(1)})
    assert len(message) < 800
    assert "given: a=float32 (1,)" in message


def test_errors_of_libraries_are_recognised() -> None:
    caught: list[Exception] = []
    for call in (lambda: torch.nn.Linear(2, 3)(torch.ones(5)), lambda: int("x")):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            caught.append(error)
    assert [errors.is_of_library(error) for error in caught] == [True, False]


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        (".", OSError("broken"), r"^\. cannot be read as a model \(broken\)"),
        ("a/b", OSError("broken"), r"^a/b is not a folder here .* zoo:NAME"),
        ("a/b", OSError("pass trust_remote_code=True"), r"^a/b holds code of its own"),
        (".", ValueError("our own message"), r"^our own message$"),
    ],
)
def test_load_errors_name_their_source(source: str, error: Exception, says: str) -> None:
    with pytest.raises(ValueError, match=says), errors.explain_load_errors(source):
        raise error


def test_errors_are_prefixed_by_the_argument() -> None:
    with pytest.raises(ValueError, match=r"^k: wrong$"), errors.prefix_errors("k"):
        raise ValueError("wrong")
