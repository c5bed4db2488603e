"""Responses of the target to the questions of a data set, in a file that is appended to.

Each line is one question: {"question": 3, "prompt": 41, "tokens": [..]}, or why it is skipped. An
incomplete last line is ignored; collection resumes after the last complete one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mmspec.errors import parse_json
from mmspec.training.conversations import Question
from mmspec.training.fitting import TrainingProgress, silent


@dataclass(frozen=True)
class Response:
    """One line of the file: a response, or why there is none."""

    question: int  # index in the data
    prompt: int = 0  # number of tokens
    tokens: tuple[int, ...] = ()
    skipped: str | None = None


GenerateResponses = Callable[[Sequence[tuple[int, Question]]], Sequence[Response]]


def collect_responses(
    file: Path,
    questions: Sequence[Question],
    generate: GenerateResponses,
    batch: int,
    progress: TrainingProgress = silent,
) -> list[Response]:
    """Return responses to all questions; generate missing ones, `batch` at a time, into the file.

    Raises OSError where the file cannot be written; its content is kept.
    """
    found = read_responses(file)
    numbered = list(enumerate(questions))
    size = sum(len(line) + 1 for line in map(_line, found))
    with file.open("ab") as stream:
        stream.truncate(size)  # drop an incomplete line
        for start in range(len(found), len(numbered), batch):
            new = generate(numbered[start : start + batch])
            try:
                stream.write(b"".join(_line(one) + b"\n" for one in new))
                stream.flush()
            except OSError as error:
                raise OSError(
                    f"{file} cannot be written ({error}); free some space on its disk and repeat "
                    "the command: it resumes after the last response"
                ) from error
            found += new
            progress("answers", len(found), len(numbered), float("nan"))
    return found


def read_responses(file: Path) -> list[Response]:
    """Read the complete lines of the file, in the order of the questions."""
    found: list[Response] = []
    if file.is_file():
        for line in file.read_bytes().split(b"\n")[:-1]:
            try:
                one = parse_json(line)
                response = Response(**{**one, "tokens": tuple(one["tokens"])})
            except (ValueError, TypeError, KeyError):
                break
            if response.question != len(found):
                break
            found.append(response)
    return found


def _line(one: Response) -> bytes:
    return json.dumps(asdict(one)).encode()
