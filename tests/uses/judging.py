"""What becomes of a wrong use: refused with a fix, refused without one, accepted, or endless."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

LIMIT_S = 60.0  # of one use
LONGEST = 1600  # characters of an error: one paragraph, the known names included
REMEDY = re.compile(
    r"\b(give|pass|use|choose|one of|known|drop|call|convert|load|train|make|install|copy|save|"
    r"set|check|pad|repeat|write|let|leave|see|must be|has to be|should be|did you mean|at least|"
    r"at most|instead|it has|measure)\b",
    re.IGNORECASE,
)

Fate = Literal["fixable", "no fix", "accepted", "endless", "traceback"]


@dataclass(frozen=True)
class Misuse:
    """One wrong call or command line; `wrong` are names or values that an error has to name."""

    text: str
    wrong: tuple[str, ...]
    call: Callable[[], Any]
    stock: Callable[[], Any] | None = None  # the same of transformers or diffusers itself


@dataclass(frozen=True)
class Judgement:
    """What became of it."""

    text: str
    fate: Fate
    message: str


class Endless(BaseException):
    """A use that took too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop what takes longer; only where Python runs at all."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Endless

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def missing(message: str, wrong: Sequence[str]) -> str:
    """What an error lacks; nothing where a reader can mend the use.

    One paragraph that names what is wrong, and a word of what to do.
    """
    if not message.strip():
        return "words"
    if "\n" in message.strip() or len(message) > LONGEST:
        return "one paragraph"
    if not any(one in message for one in wrong):
        return f"the name: none of {list(wrong)}"
    return "" if REMEDY.search(message) else "a remedy"


def judge(use: Misuse) -> Judgement | None:
    """None for a use that is not wrong after all: the library itself takes it too."""
    try:
        with time_limit(LIMIT_S):
            use.call()
    except Endless:
        return Judgement(use.text, "endless", f"stopped after {LIMIT_S} s")
    except (ValueError, TypeError, OSError) as error:
        lacks = missing(str(error), use.wrong)
        shown = f"{type(error).__name__}: {error}"
        return Judgement(use.text, "no fix" if lacks else "fixable", f"[{lacks}] {shown}")
    except Exception as error:  # whatever else comes out was not meant for the user
        return Judgement(use.text, "no fix", f"[another error] {type(error).__name__}: {error}")
    if use.stock is not None and not _refuses(use.stock):
        return None
    return Judgement(use.text, "accepted", "")


def _refuses(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        return True
    return False


def report(found: Sequence[Judgement]) -> str:
    """Everything that is not as it should be, one kind after the other."""
    counts = Counter(one.fate for one in found)
    lines = [", ".join(f"{count} {fate}" for fate, count in sorted(counts.items()))]
    lines += [
        f"{one.fate}: {one.text}\n    {one.message}" for one in found if one.fate != "fixable"
    ]
    return "\n".join(lines)
