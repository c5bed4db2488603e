"""Read training data as questions, from rows of three forms.

    {"prompt": "What is this?", "image": "cat.png", "answer": "A cat."}
    {"messages": [{"role": "user", "content": "What is this?"}, ...], "images": ["cat.png"]}
    {"conversations": [{"from": "human", "value": "<image>\\nWhat is this?"}, ...], "image": ...}

The second is the chat format of OpenAI and many services, whose contents may be lists of parts; the
third is the format of LLaVA and ShareGPT. Answers are optional where the target generates its own.
Each user turn, and each result of tools, is a separate question, with the previous turns of the
data as its prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmspec.training.data_files import BadRow, hash_data, read_rows
from mmspec.training.media import IMAGE, VIDEO, Media, MediaFolders
from mmspec.training.turns import Mark, Turn, read_tools, read_turns

__all__ = ["BadRow", "DataSet", "Question", "Turn", "digest", "read_data_set", "read_questions"]

SHOWN = 4  # bad rows in an error
_COLUMNS = {IMAGE: ("images", "image"), VIDEO: ("videos", "video")}


@dataclass(frozen=True, slots=True)
class Question:
    """Turns up to a user's or a tool's, the media in them, and the answer in the data."""

    turns: tuple[Turn, ...]
    images: tuple[Media, ...]
    answer: str | None
    place: str  # file:line
    row: int  # of the data; questions of one conversation share it
    videos: tuple[Media, ...] = ()
    tools: tuple[Any, ...] = ()  # schemas for the chat template

    @property
    def media_kinds(self) -> tuple[str, ...]:
        """The kinds of media; questions of one batch have the same."""
        return (IMAGE,) * bool(self.images) + (VIDEO,) * bool(self.videos)


@dataclass
class DataSet:
    """Questions of a file or folder, the rows that have none, and the number of all rows."""

    source: Path
    questions: list[Question]
    bad: list[BadRow] = field(default_factory=list)
    rows: int = 0

    def leave_out(self, reasons: Mapping[int, str]) -> DataSet:
        """Leave out rows, by their number in the data."""
        places = {one.row: one.place for one in self.questions}
        bad = [BadRow(places[row], reason) for row, reason in sorted(reasons.items())]
        kept = [one for one in self.questions if one.row not in reasons]
        return DataSet(self.source, kept, [*self.bad, *bad], self.rows)

    def check(self, most: int) -> None:
        """Refuse more bad rows than `most`, and data without a question. Raises ValueError."""
        count = len(self.bad)
        if count > most:
            shown = "; ".join(map(str, self.bad[:SHOWN])) + "; ..." * (count > SHOWN)
            raise ValueError(
                f"{shown} ({count} of {self.rows} rows cannot be used; correct them, or give "
                f"--max-bad-rows {count} to leave them out)"
            )
        if not self.questions:
            raise ValueError(
                f"{self.source} holds no question; give rows such as those in docs/training.md"
            )


def read_questions(data: Path, images: Path | None = None) -> list[Question]:
    """All questions in a file or a folder.

    Raises ValueError with file and line for bad rows.
    """
    found = read_data_set(data, MediaFolders(media_base(data, images)))
    found.check(0)
    return found.questions


def media_base(data: Path, images: Path | None) -> Path:
    """The folder that names of images are relative to: `images`, or that of the data."""
    return images or (data if data.is_dir() else data.parent)


def read_data_set(data: Path, folders: MediaFolders) -> DataSet:
    """Read all rows of a file or a folder, good and bad ones.

    Media are located, but not opened. Raises ValueError for files that cannot be read on, such as
    a damaged JSON array.
    """
    found = DataSet(data, [])
    for number, row in enumerate(read_rows(data)):
        found.rows += 1
        if isinstance(row, BadRow):
            found.bad.append(row)
            continue
        try:
            found.questions += _questions(row.content, row.place, number, folders)
        except ValueError as error:
            found.bad.append(BadRow(row.place, str(error)))
    return found


def digest(data: Path, bad: Sequence[BadRow] = ()) -> str:
    """Hash names and bytes of the data files, without images, and the places of bad rows."""
    found = hash_data(data)
    places = "\n".join(sorted(Path(one.place).name for one in bad))
    return hashlib.sha256(f"{found}\n{places}".encode()).hexdigest() if bad else found


def _questions(
    row: Mapping[str, Any], place: str, number: int, folders: MediaFolders
) -> list[Question]:
    """The questions of a row. Raises ValueError for a row of another form."""
    named = {kind: _named(row, kind) for kind in (IMAGE, VIDEO)}
    turns = read_turns(row, has_videos=bool(named[VIDEO]))
    own: dict[str, list[Media]] = {}
    for kind in (IMAGE, VIDEO):
        turns, values = _place_media(turns, named[kind], kind)
        own[kind] = [folders.find(value, kind) for value in values]
    tools, found = read_tools(row), []
    for at, turn in enumerate(turns):
        is_asked = turn.role == "user" or (
            turn.role == "tool" and not (at + 1 < len(turns) and turns[at + 1].role == "tool")
        )
        if not is_asked:
            continue
        if turn.role == "user" and not turn.text.strip():
            raise ValueError("has an empty question; give it some text")
        before = tuple(turns[: at + 1])
        after = turns[at + 1] if at + 1 < len(turns) else None
        answer = after.text if after is not None and after.role == "assistant" else None
        images, videos = (tuple(own[kind][: _count_marks(before, kind)]) for kind in (IMAGE, VIDEO))
        found.append(Question(before, images, answer or None, place, number, videos, tools))
    if not found:
        raise ValueError("has no turn of a user; give it a question")
    return found


def _named(row: Mapping[str, Any], kind: str) -> list[Any]:
    """Media of a kind that a row names beside its turns. Raises ValueError for two lists."""
    found = [row[name] for name in _COLUMNS[kind] if row.get(name) not in (None, [])]
    if len(found) > 1:
        raise ValueError(f"has {' and '.join(_COLUMNS[kind])}; keep one of them")
    return [one for value in found for one in (value if isinstance(value, list) else [value])]


def _place_media(turns: list[Turn], named: list[Any], kind: str) -> tuple[list[Turn], list[Any]]:
    """Return turns with a mark per item of a kind, and the items in the order of the marks.

    Items without any mark precede the user's first text.
    """
    parts = (part for turn in turns for part in turn.parts)
    marks = [part for part in parts if isinstance(part, Mark) and part.kind == kind]
    values = [mark.value for mark in marks if mark.value is not None]
    if values and named and len(values) + len(named) != len(marks):
        raise ValueError(f"names {kind}s both in its turns and beside them; name each once")
    rest = iter(named)
    if not marks and named:
        first = next((at for at, turn in enumerate(turns) if turn.role == "user"), 0)
        front = (Mark(kind),) * len(named)
        return [
            turn.with_parts((*front, *turn.parts)) if at == first else turn
            for at, turn in enumerate(turns)
        ], named
    if len(marks) - len(values) != len(named):
        raise ValueError(
            f"has {len(marks)} marks of {kind}s (<{kind}>) but names {len(values) + len(named)} "
            f"{kind}s; name one for each mark, or remove the marks"
        )
    if not values:
        return turns, named
    bare = [turn.with_parts(tuple(map(_without_value, turn.parts))) for turn in turns]
    return bare, [next(rest) if mark.value is None else mark.value for mark in marks]


def _without_value(part: str | Mark) -> str | Mark:
    return Mark(part.kind) if isinstance(part, Mark) else part


def _count_marks(turns: Iterable[Turn], kind: str) -> int:
    return sum(_is_mark(part, kind) for turn in turns for part in turn.parts)


def _is_mark(part: Any, kind: str) -> bool:
    return isinstance(part, Mark) and part.kind == kind
