"""Responses of the target to the questions of a data set, in files that are appended to.

    answers.jsonl          of the first process, and of earlier runs
    answers-00001.jsonl    of the second process, until the first one merges the files

Each line is one question: {"question": 3, "prompt": 41, "tokens": [..]}, or why it is skipped.
Incomplete lines and batches are generated again, so responses do not depend on interruptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mmspec.errors import parse_json
from mmspec.training.conversations import Question
from mmspec.training.fitting import TrainingProgress, silent
from mmspec.training.processes import Processes


@dataclass(frozen=True)
class Response:
    """One line of the file: a response, or why there is none."""

    question: int  # index in the data
    prompt: int = 0  # number of tokens
    tokens: tuple[int, ...] = ()
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
        for line in one.read_bytes().split(b"\n")[:-1]:
            try:
                content = parse_json(line)
                response = Response(**{**content, "tokens": tuple(content["tokens"])})
            except (ValueError, TypeError, KeyError):
                continue  # generated again
            found[response.question] = response
    return [found[number] for number in sorted(found)]


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
    content = b"".join(_line(found[number]) for one in kept for number, _ in one)
    if files == [file] and file.read_bytes() == content:
        return
    try:
        part.write_bytes(content)
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


def _line(one: Response) -> bytes:
    return json.dumps(asdict(one)).encode() + b"\n"
