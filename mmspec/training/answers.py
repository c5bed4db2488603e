"""What is said to the questions of a data set, in a file that grows as it is found.

Each line is one question: {"question": 3, "prompt": 41, "tokens": [..]}, or why it is left out. A
line that was cut off by a kill is not believed; the questions behind the last whole one are asked
again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mmspec.training.conversations import Question
from mmspec.training.reporting import Report, silent


@dataclass(frozen=True)
class TaughtAnswer:
    """One line of the file: an answer, or why there is none."""

    question: int  # which of the data's
    prompt: int = 0  # tokens
    tokens: tuple[int, ...] = ()
    skipped: str | None = None


Answer = Callable[[Sequence[tuple[int, Question]]], Sequence[TaughtAnswer]]


def collect(
    file: Path,
    questions: Sequence[Question],
    answer: Answer,
    batch: int,
    progress: Report = silent,
) -> list[TaughtAnswer]:
    """The answers to all questions; those that the file lacks are asked for, `batch` at a time.

    Raises OSError where the file cannot grow; what it holds is kept.
    """
    found = known(file)
    asked = list(enumerate(questions))
    size = sum(len(line) + 1 for line in map(_line, found))
    with file.open("ab") as grown:
        grown.truncate(size)  # nothing of a line that was cut off
        for start in range(len(found), len(asked), batch):
            new = answer(asked[start : start + batch])
            try:
                grown.write(b"".join(_line(one) + b"\n" for one in new))
                grown.flush()
            except OSError as error:
                raise OSError(
                    f"{file} cannot grow ({error}); free some space on its disk, and give the same "
                    "command again: it goes on from the answers it has"
                ) from error
            found += new
            progress("answers", len(found), len(asked), float("nan"))
    return found


def known(file: Path) -> list[TaughtAnswer]:
    """The whole lines of the file, in the order of the questions."""
    found: list[TaughtAnswer] = []
    if file.is_file():
        for line in file.read_bytes().split(b"\n")[:-1]:
            try:
                one = json.loads(line)
                made = TaughtAnswer(**{**one, "tokens": tuple(one["tokens"])})
            except (ValueError, TypeError, KeyError):
                break
            if made.question != len(found):
                break
            found.append(made)
    return found


def _line(one: TaughtAnswer) -> bytes:
    return json.dumps(asdict(one)).encode()
