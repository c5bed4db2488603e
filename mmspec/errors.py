"""Sentences of errors that several parts say: what was given, the rule, the fix."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

Part = TypeVar("Part")

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


def an(words: str) -> str:
    """The words with their article."""
    return f"{'an' if words[:1].lower() in tuple('aeio') else 'a'} {words}"


def first_line(error: Exception) -> str:
    """The first line of an error, with its type."""
    line = (str(error).splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {line}"


def chosen(option: str, value: Any, known: Mapping[str, Part]) -> Part:
    """The part of that name, or a part of their kinds itself. Raises ValueError with the names."""
    if isinstance(value, str) and value in known:
        return known[value]
    if type(value) in {type(one) for one in known.values()}:
        return cast("Part", value)
    raise ValueError(f"{option}={value!r} is not known; choose one of {', '.join(known)}")


def is_whole(value: Any) -> bool:
    """Whether it counts something; True and False do not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def without_draft(inputs: Mapping[str, Any], drafter: Any) -> Mapping[str, Any]:
    """Inputs of a drafter that looks at no text of the call. Raises ValueError for one."""
    if "draft" in inputs:
        raise ValueError(
            f"drafter_inputs has a draft, which {type(drafter).__name__} would not look at; drop "
            "it, or use recipe 'hsd'"
        )
    return inputs


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


def refuse_fixed(given: Mapping[str, Any], names: Iterable[str], call: str, why: str) -> None:
    """Refuse arguments that a call decides about by itself. Raises ValueError."""
    fixed = [name for name in names if given.get(name) is not None]
    if fixed:
        raise ValueError(f"{', '.join(fixed)} cannot be given to {call}: {why}")


def check_vocabulary(what: str, counted: int, size: int, remedy: str) -> None:
    """Refuse distributions over another vocabulary than a table counts. Raises ValueError."""
    if size != counted:
        raise ValueError(
            f"{what} counts {counted} token ids, but the target's vocabulary has {size}; {remedy}"
        )


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither true nor false. Raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is neither True nor False; give one of them")


def check_like(name: str, value: Any, usual: Any) -> None:
    """Refuse an option of another kind than the usual value; None there leaves the kind open.

    In the place of a name there may be an object of a class of its own. How far a number may go is
    left to the part that takes it: a threshold may lie below 0, where nothing passes it. Raises
    ValueError.
    """
    if isinstance(usual, bool):
        check_flag(name, value)
    elif is_whole(usual):
        check_number(name, value, 0, whole=True, example=usual)
    elif isinstance(usual, Real):
        if value != math.inf:
            check_number(name, value, example=float(usual))
    elif isinstance(usual, str) and not isinstance(value, str):
        if type(value).__module__ == "builtins":
            raise ValueError(f"{name}={value!r} is no name; give one, such as {usual!r}")
    elif isinstance(usual, list | tuple) and not isinstance(value, list | tuple):
        raise ValueError(f"{name}={value!r} is no list; give one, such as {list(usual)}")


def is_of_library(error: Exception) -> bool:
    """Whether an error arose within a library that we call, in its own Python code."""
    frames = list(traceback.walk_tb(_raised(error).__traceback__))
    return bool(frames) and frames[-1][0].f_globals["__name__"].partition(".")[0] in LIBRARIES


def _raised(error: Exception) -> Exception:
    """The error itself: a StopIteration leaves a generator of ours as another one's cause."""
    return error.__cause__ if isinstance(error.__cause__, StopIteration) else error


@contextmanager
def reading(source: str | Path, what: str = "model") -> Iterator[None]:
    """Name the folder or the hub's name that a library cannot read, and say what may be done."""
    try:
        yield
    except Exception as error:
        is_ours = isinstance(error, ValueError) and not is_of_library(error)
        if is_ours or isinstance(error, MemoryError):
            raise
        reason = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{source} holds code of its own, which is not run; read that code, and pass "
                "trust_remote_code=True where you trust it"
            ) from error
        if Path(source).exists():
            raise ValueError(
                f"{source} cannot be read as a {what} ({reason}); copy it again, or give a folder "
                "that save_pretrained wrote"
            ) from error
        raise ValueError(
            f"{source} is no folder here and cannot be read from the hub ({reason}); check the "
            "name and the connection, or give a folder or zoo:NAME"
        ) from error


@contextmanager
def about(name: str) -> Iterator[None]:
    """Name the argument that an error is about, where what finds it does not know the name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def nothing_drawn() -> NoReturn:
    """The picture of a round that has none. Raises ValueError."""
    raise ValueError(
        "there is no picture so far: this round is not of generate_images(), or nobody watched it; "
        "take the rounds of stream(), or of on_round="
    )


def library_message(error: Exception, asked: str, given: Mapping[str, Any]) -> str:
    """What a library said of a request, what that was, and where to look."""
    error = _raised(error)
    said = " ".join(str(error).split()) or "without a word"
    said = said if len(said) < 500 else f"{said[:350]} ... {said[-140:]}"  # whole tensors, at times
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
    try:
        words = " ".join(repr(value).split())
    except Exception:  # a GenerationConfig with tensors in it
        return f"a {type(value).__name__}"
    return words if len(words) < 60 else f"{words[:57]}..."
