"""Responses of the target to the questions of a data set, in files that are appended to.

    answers.jsonl          of the first process, and of earlier runs
    answers-00001.jsonl    of the second process, until the first one merges the files

Each line is one question: {"question": 3, "prompt": 41, "tokens": [..]}, or why it is skipped.
Incomplete lines and batches are generated again, so responses do not depend on interruptions.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch

from mmspec.errors import parse_json
from mmspec.training.conversations import Question
from mmspec.training.fitting import TrainingProgress, silent
from mmspec.training.processes import Processes


@dataclass(frozen=True, slots=True)
class Response:
    """One line of the file: a response, or why there is none."""

    question: int  # index in the data
    prompt: int = 0  # number of tokens
    tokens: Sequence[int] = ()  # an array once it was read: a ninth of a tuple's memory
    skipped: str | None = None


NumberedQuestions = Sequence[tuple[int, Question]]
# yields the responses to each batch, in any order of batches
GenerateResponses = Callable[[Iterable[NumberedQuestions]], Iterator[Sequence[Response]]]


def collect_responses(
    file: Path,
    questions: Sequence[Question],
    generate: GenerateResponses,
    batch: int,
    processes: Processes | None = None,
    progress: TrainingProgress = silent,
) -> list[Response]:
    """Return responses to all questions; generate missing ones, `batch` at a time, into the file.

    Processes share the batches; each writes a file of its own beside `file`, which the first one
    merges. Their number may change between runs. Raises OSError where a file cannot be written; its
    content is kept.
    """
    processes = Processes() if processes is None else processes
    numbered = list(enumerate(questions))
    batches = [numbered[start : start + batch] for start in range(0, len(numbered), batch)]
    if processes.is_first:
        _merge(file, batches)
    processes.wait()
    found = read_responses(file)
    present = {one.question for one in found}
    processes.wait()  # all have read what the first one appends to
    missing = [one for one in batches if one[0][0] not in present]
    own = processes.share(missing)
    done, total = len(numbered) - sum(map(len, missing)), sum(map(len, own))
    for count, new in enumerate(generate(own), 1):
        if processes.writes:
            _append(_own_file(file, processes.index), new)
        progress("answers", done + min(count * batch, total), done + total, float("nan"))
    if processes.size == 1 and not missing:
        return found
    processes.wait()
    if processes.is_first:
        _merge(file, batches)
    processes.wait()
    found = read_responses(file)
    if len(found) < len(questions):
        raise ValueError(
            f"{file} holds {len(found)} of {len(questions)} answers after all were generated; give "
            "--out a folder that all processes share"
        )
    return found


def read_responses(file: Path) -> list[Response]:
    """Read the complete lines of all files, in the order of the questions."""
    found: dict[int, Response] = {}
    for one in _files(file):
        with one.open("rb") as lines:
            for line in lines:
                try:
                    content = parse_json(line) if line.endswith(b"\n") else {}
                    response = Response(**{**content, "tokens": array("i", content["tokens"])})
                except (ValueError, TypeError, KeyError, OverflowError):
                    continue  # generated again
                found[response.question] = response
    return [found[number] for number in sorted(found)]


def digest_responses(responses: Iterable[Response]) -> str:
    """A hash of the tokens of responses."""
    sha = hashlib.sha256(b"[")
    for number, one in enumerate(responses):
        sha.update(f"{', ' * bool(number)}{(one.question, tuple(one.tokens))!r}".encode())
    sha.update(b"]")
    return sha.hexdigest()


def concatenate_tokens(responses: Iterable[Response]) -> torch.Tensor:  # (n,) int64
    """All tokens of responses."""
    found = [np.asarray(one.tokens, np.int32) for one in responses]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *found])).long()


def _append(file: Path, new: Sequence[Response]) -> None:
    try:
        with file.open("ab") as stream:
            stream.write(b"".join(map(_line, new)))
    except OSError as error:
        raise _unwritable(file, error) from error


def _merge(file: Path, batches: Sequence[NumberedQuestions]) -> None:
    """Merge the complete batches of all files into one, in order. Raises OSError."""
    found = {one.question: one for one in read_responses(file)}
    kept = [one for one in batches if all(number in found for number, _ in one)]
    part, files = file.with_name(f"{file.name}.part"), _files(file)
    numbers = [number for one in kept for number, _ in one]
    if files == [file]:
        with file.open("rb") as lines:
            if all(old == new for old, new in zip_longest(lines, _lines(found, numbers))):
                return
    try:
        with part.open("wb") as stream:
            stream.writelines(_lines(found, numbers))
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _unwritable(file, error) from error
    for one in files:
        if one != file:
            one.unlink()


def _files(file: Path) -> list[Path]:
    """The file, and those of other processes."""
    others = sorted(file.parent.glob(f"{file.stem}-*{file.suffix}"))
    return [*([file] if file.is_file() else []), *others]


def _own_file(file: Path, process: int) -> Path:
    return file if process == 0 else file.with_name(f"{file.stem}-{process:05d}{file.suffix}")


def _unwritable(file: Path, error: OSError) -> OSError:
    return OSError(
        f"{file} cannot be written ({error}); free some space on its disk and repeat the command: "
        "it resumes after the last response"
    )


def _lines(found: Mapping[int, Response], numbers: Iterable[int]) -> Iterator[bytes]:
    return (_line(found[number]) for number in numbers)


def _line(one: Response) -> bytes:
    content = {"question": one.question, "prompt": one.prompt, "tokens": list(one.tokens)}
    return json.dumps({**content, "skipped": one.skipped}).encode() + b"\n"
