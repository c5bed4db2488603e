"""Sentences of errors that several parts say: what was given, the rule, the fix."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

LIBRARIES = frozenset(
    ("torch", "transformers", "diffusers", "tokenizers", "huggingface_hub", "safetensors", "PIL")
)


def unknown_message(given: Sequence[str], known: Iterable[str], where: str) -> str:
    """What was given, the nearest known keyword, and all of them."""
    names = list(known)
    near = get_close_matches(given[0], names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    shown = ", ".join(name or "''" for name in given)
    return f"unknown keyword {shown} for {where}{hint} known: {', '.join(names)}"


def is_whole(value: Any) -> bool:
    """Whether it counts something; True and False do not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    whole: bool = False,
    example: float = 1,
) -> None:
    """Refuse what is no (whole) number, no finite one, or out of range. Raises ValueError."""
    is_one = is_whole(value) if whole else isinstance(value, Real) and not isinstance(value, bool)
    if is_one and math.isfinite(value) and least <= value <= most:
        return
    limits = [f"at least {least:g}"] * (least > -math.inf) + [f"at most {most:g}"] * (
        most < math.inf
    )
    kind = "whole number" if whole else "number"
    within = f" of {' and '.join(limits)}" if limits else ""
    raise ValueError(f"{name}={value!r} is no {kind}{within}; give one, such as {example}")


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither true nor false. Raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is neither True nor False; give one of them")


def is_of_library(error: Exception) -> bool:
    """Whether an error arose within a library that we call, in its own Python code."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals["__name__"].partition(".")[0] in LIBRARIES


def library_message(error: Exception, asked: str, given: Mapping[str, Any]) -> str:
    """What a library said of a request, what that was, and where to look."""
    said = " ".join(str(error).split()) or "without a word"
    shown = ", ".join(f"{name}={described(value)}" for name, value in given.items())
    return (
        f"{asked} cannot take this request ({type(error).__name__}: {said}); given: {shown}; check "
        "these, and give tensors as the model's own processor makes them"
    )


def described(value: Any) -> str:
    """A value as an error shows it: tensors by dtype and shape, long ones cut."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(shape)}"
    words = " ".join(repr(value).split())
    return words if len(words) < 60 else f"{words[:57]}..."
