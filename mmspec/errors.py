"""Checks of arguments and the messages of their errors: what was given, the rule, the fix."""

from __future__ import annotations

import json
import math
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast
from urllib.parse import urlsplit

Part = TypeVar("Part")

LIBRARIES = frozenset(
    ("torch", "transformers", "diffusers", "tokenizers", "huggingface_hub", "safetensors", "PIL")
)


# names of other libraries, and what means the same here
SYNONYMS = {
    **dict.fromkeys(("num_images", "n"), ("num_return_sequences", "num_images_per_prompt")),
    **dict.fromkeys(("num_images_per_prompt", "batch_size"), ("num_return_sequences",)),
    **dict.fromkeys(
        ("num_speculative_tokens", "num_assistant_tokens", "num_draft_tokens", "gamma"),
        ("length", "window"),
    ),
    **dict.fromkeys(("assistant_model", "draft_model", "speculative_model"), ("drafter",)),
    **dict.fromkeys(("callback_on_step_end", "callback", "callback_steps"), ("on_round",)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), ("max_new_tokens",)),
    "num_inference_steps": ("steps",),
    "speculative_config": ("recipe",),
}


def nearest_name(given: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: a synonym, else a similar one."""
    names = list(known)
    same = [name for name in SYNONYMS.get(given, ()) if name in names]
    return next(iter(same or get_close_matches(given, names, n=1)), None)


def unknown_message(given: Sequence[str], known: Iterable[str], where: str) -> str:
    """The message for an unknown keyword: what was given, the nearest known one, and all."""
    names = list(known)
    near = nearest_name(given[0], names)
    hint = f"; did you mean {near!r}?" if near else ";"
    shown = ", ".join(name or "''" for name in given)
    return f"unknown keyword {shown} for {where}{hint} known: {', '.join(names)}"


def with_article(text: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if text[:1].lower() in tuple('aeio') else 'a'} {text}"


def first_line(error: Exception) -> str:
    """The first line of an error, with its type."""
    line = (str(error).splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {line}"


def choose_option(option: str, value: Any, known: Mapping[str, Part]) -> Part:
    """The part of that name, or an instance of their types. Raises ValueError listing the names."""
    if isinstance(value, str) and value in known:
        return known[value]
    if type(value) in {type(one) for one in known.values()}:
        return cast("Part", value)
    raise ValueError(f"{option}={value!r} is not known; choose one of {', '.join(known)}")


def is_integer(value: Any) -> bool:
    """Whether it is an integer and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_among(value: Any, known: Iterable[Any]) -> bool:
    """Whether it is one of these values, where True and False are no numbers."""
    kind = isinstance(value, bool)
    return any(value == one and isinstance(one, bool) == kind for one in known)


def is_http_address(url: str) -> bool:
    """Whether it is http(s)://HOST[:PORT][/PATH], to which paths can be appended."""
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.port != 0 else None
    except ValueError:
        return False
    is_clean = url.isascii() and url.isprintable() and not set(" ?#@") & set(url)
    return parts.scheme in ("http", "https") and bool(host) and is_clean


def check_no_draft(inputs: Mapping[str, Any], drafter: Any) -> Mapping[str, Any]:
    """Return the inputs of a drafter without a draft text.

    Raises ValueError for a text, and for any input of a drafter that reads no prompt.
    """
    if "draft" in inputs:
        raise ValueError(
            f"drafter_inputs has a draft, which {type(drafter).__name__} would not look at; drop "
            "it, or use recipe 'hsd'"
        )
    if inputs and not drafter.reads_prompt:
        raise ValueError(
            f"drafter_inputs has {', '.join(map(str, inputs))}, but {type(drafter).__name__} reads "
            "no prompt of its own; drop drafter_inputs"
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
    """Check for a finite (whole) number within the range. Raises ValueError."""
    is_one = is_integer(value) if whole else isinstance(value, Real) and not isinstance(value, bool)
    if is_one and math.isfinite(value) and least <= value <= most:
        return
    limits = [f"at least {least:g}"] * (least > -math.inf) + [f"at most {most:g}"] * (
        most < math.inf
    )
    kind = "whole number" if whole else "number"
    within = f" of {' and '.join(limits)}" if limits else ""
    raise ValueError(
        f"{name}={format_value(value)} must be a {kind}{within}; give one, such as {example}"
    )


def check_is_file(file: Path) -> None:
    """Refuse a folder, and a pipe, which a reader would wait for. Raises ValueError."""
    if file.exists() and not file.is_file():
        kind = "folder" if file.is_dir() else "pipe or a device"
        raise ValueError(f"{file} is a {kind}, not a file; give a file")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for invalid and for deeply nested text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def refuse_fixed(given: Mapping[str, Any], names: Iterable[str], call: str, why: str) -> None:
    """Refuse arguments that a call sets itself. Raises ValueError."""
    fixed = [name for name in names if given.get(name) is not None]
    if fixed:
        raise ValueError(f"{', '.join(fixed)} cannot be given to {call}: {why}")


def check_vocabulary(what: str, counted: int, size: int, remedy: str) -> None:
    """Check that a table covers the target's vocabulary. Raises ValueError."""
    if size != counted:
        raise ValueError(
            f"{what} counts {counted} token ids, but the target's vocabulary has {size}; {remedy}"
        )


def check_flag(name: str, value: Any) -> None:
    """Check for a bool. Raises ValueError."""
    if not isinstance(value, bool):
        raise ValueError(
            f"{name}={format_value(value)} is neither True nor False; give one of them"
        )


def check_same_kind(name: str, value: Any, usual: Any, least: int | None = None) -> None:
    """Check that an option has the type of its default; a default of None allows any type.

    A name may be replaced by an object of another class. The range of a number is checked by the
    part that takes it: a threshold may be below 0, where nothing passes it. `least` is the smallest
    whole number that the part takes, where it is known, for the error. Raises ValueError.
    """
    if isinstance(usual, bool):
        check_flag(name, value)
    elif is_integer(usual):
        if not is_integer(value) or value < 0:
            bound = 0 if least is None and is_integer(value) else least
            check_number(
                name, value, -math.inf if bound is None else bound, whole=True, example=usual
            )
    elif isinstance(usual, Real):
        if not (isinstance(value, Real) and value == math.inf):
            check_number(name, value, example=float(usual))
    elif isinstance(usual, str) and not isinstance(value, str):
        if type(value).__module__.partition(".")[0] in {"builtins", "numpy", *LIBRARIES}:
            raise ValueError(
                f"{name}={format_value(value)} is not a name; give one, such as {usual!r}"
            )
    elif isinstance(usual, list | tuple) and not isinstance(value, list | tuple):
        raise ValueError(f"{name}={value!r} is not a list; give one, such as {list(usual)}")


def is_of_library(error: Exception) -> bool:
    """Whether an error was raised by the Python code of a library that we call."""
    frames = list(traceback.walk_tb(unwrap_error(error).__traceback__))
    return bool(frames) and frames[-1][0].f_globals["__name__"].partition(".")[0] in LIBRARIES


def unwrap_error(error: Exception) -> Exception:
    """The original error: a StopIteration leaves a generator as the cause of another error."""
    return error.__cause__ if isinstance(error.__cause__, StopIteration) else error


@contextmanager
def explain_load_errors(source: str | Path, what: str = "model") -> Iterator[None]:
    """Name the folder or hub name that a library cannot read, and the fix, in its error."""
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
            f"{source} is not a folder here and cannot be read from the hub ({reason}); check the "
            "name and the connection, or give a folder or zoo:NAME"
        ) from error


@contextmanager
def prefix_errors(name: str) -> Iterator[None]:
    """Prefix the message of a ValueError with the name of the argument."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def raise_no_picture() -> NoReturn:
    """The default of `Round.partial`. Raises ValueError."""
    raise ValueError(
        "there is no partial image: this round is not of generate_images(), or was not observed; "
        "use the rounds of stream(), or of on_round="
    )


def library_message(error: Exception, caller: str, given: Mapping[str, Any]) -> str:
    """The message for a request that a library refused: its error, the inputs, and the fix."""
    error = unwrap_error(error)
    reason = " ".join(str(error).split()) or "no message"
    if len(reason) >= 500:  # whole tensors, at times
        reason = f"{reason[:350]} ... {reason[-140:]}"
    shown = ", ".join(f"{name}={format_value(value)}" for name, value in given.items())
    has_tensors = any(getattr(value, "shape", None) for value in given.values())
    tensors = ", and give tensors as the model's own processor makes them" * has_tensors
    return (
        f"{caller} cannot take this request ({type(error).__name__}: {reason}); given: {shown}; "
        f"check these{tensors}"
    )


def format_value(value: Any) -> str:
    """Format a value for an error message: tensors by dtype and shape, long ones truncated."""
    shape = getattr(value, "shape", None)
    if shape:
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(shape)}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a GenerationConfig with tensors in it
        return f"a {type(value).__name__}"
    return text if len(text) < 60 else f"{text[:57]}..."


def parse_parameters(text: str, known: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Parse `keep=0.25,mass=1`; `known` are the parameters of `name` and their defaults.

    A comma separates where a name follows it, so that paths may have some. Raises ValueError for
    unknown parameters, listing the known ones, and for values of another type than the default's.
    """
    given = {}
    for pair in split_parameters(text):
        key, _, value = pair.partition("=")
        if key not in known or not value:
            listed = ", ".join(f"{key}={default}" for key, default in known.items()) or "none"
            raise ValueError(f"{pair!r} is not a parameter of {name!r}; it has {listed}")
        given[key] = _value(value, known[key], pair)
    return given


def split_parameters(text: str) -> list[str]:
    """The pairs of `keep=0.25,mass=1`.

    A value that is an existing path is one, commas and `,name=` in it included: the longest.
    """
    parts, pairs = [one for one in re.split(r",(?=\w+=|$)", text) if one], list[str]()
    while parts:
        ends = range(len(parts), 1, -1)
        end = next((end for end in ends if _exists(",".join(parts[:end]))), 1)
        pairs.append(",".join(parts[:end]))
        del parts[:end]
    return pairs


def _exists(pair: str) -> bool:
    """Whether the value of a pair is the path of something that exists."""
    try:
        return Path(pair.partition("=")[2]).exists()
    except OSError:  # too long for a name
        return False


def _value(text: str, default: Any, pair: str) -> Any:
    """Parse a value of the default's type; a string where the default is None."""
    try:
        value = parse_json(text)
    except ValueError:
        value = text
    wanted = str if default is None else type(default)
    if type(value) is not wanted and not (wanted is float and type(value) is int):
        raise ValueError(
            f"{pair!r} gives no {wanted.__name__}; give one, as in the default {default}"
        )
    return value


def check_embedded(largest: int, size: int) -> None:
    """Refuse a token id that a draft model of `size` tokens has no embedding of.

    The kernel of an accelerator would end the process. Raises ValueError.
    """
    if largest >= size:
        raise ValueError(
            f"the text has token {largest}, but the draft model only {size} tokens; resize its "
            "embeddings as the target's"
        )
