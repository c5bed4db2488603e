"""Training data as people have it: rows of JSON Lines, or a folder, become questions.

    {"prompt": "What is this?", "image": "cat.png", "answer": "A cat."}
    {"messages": [{"role": "user", "content": "What is this?"}, ...], "images": ["cat.png"]}
    {"conversations": [{"from": "human", "value": "<image>\\nWhat is this?"}, ...], "image": ...}

The second is the chat form of many services, whose contents may be lists of parts; the third is
that of LLaVA's and ShareGPT's data. Answers may be left out where the target is going to give its
own. Each turn of a user is a question of its own, behind the turns before it as the data have them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "<image>"  # where a picture stands in a text
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


@dataclass(frozen=True)
class Turn:
    """What one side says: texts, and None where a picture stands."""

    role: str  # system, user or assistant
    parts: tuple[str | None, ...]


@dataclass(frozen=True)
class Question:
    """Turns up to a user's, the pictures in them, and what the data answer."""

    turns: tuple[Turn, ...]
    pictures: tuple[Path, ...]
    answer: str | None
    place: str  # file:line
    row: int  # of the data; questions of one conversation share it


def read_questions(data: Path, images: Path | None = None) -> list[Question]:
    """All questions in a file of JSON Lines, or in a folder.

    Of a folder these are its .jsonl files; where it has none, its pictures, each with its prompt in
    a .txt beside it. Pictures are looked for under `images`, by default beside the data. Raises
    ValueError naming file and line for what is no such row, and for marks without their pictures.
    """
    files = data_files(data)
    root = images or (data if data.is_dir() else data.parent)
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; give --images the one the pictures lie in")
    rows = _rows(files) if files[0].suffix == ".jsonl" else _pictured(files)
    found = [
        question
        for number, (place, row) in enumerate(rows)
        for question in _questions(row, place, number, root)
    ]
    if not found:
        raise ValueError(f"{data} holds no question; give rows such as those in docs/training.md")
    return found


def data_files(data: Path) -> list[Path]:
    """The files that rows come from. Raises ValueError where there are none."""
    if data.is_file():
        if data.suffix != ".jsonl":
            raise ValueError(
                f"{data} is no file of JSON Lines; give --data one that ends in .jsonl"
            )
        return [data]
    if not data.is_dir():
        raise ValueError(f"there is no {data}; give --data a .jsonl file or a folder")
    found = sorted(data.glob("*.jsonl"))
    others = sorted(one for one in data.iterdir() if one.suffix not in ("", ".txt"))
    found = found or [one for one in others if one.with_suffix(".txt").is_file()]
    if not found:
        raise ValueError(
            f"{data} holds neither a .jsonl file nor pictures with a .txt beside each; give --data "
            "another folder"
        )
    return found


def digest(data: Path) -> str:
    """What tells data from other data: names and bytes of its files, but not the pictures'."""
    made = hashlib.sha256()
    for file in data_files(data):
        text = file if file.suffix == ".jsonl" else file.with_suffix(".txt")
        made.update(file.name.encode() + b"\0" + text.read_bytes())
    return made.hexdigest()


def _rows(files: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{file}:{number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{place} is no JSON ({error}); mend that line") from error
                if not isinstance(row, Mapping):
                    raise ValueError(f"{place} is no object but a {type(row).__name__}; mend it")
                yield place, row


def _pictured(files: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in files:
        text = file.with_suffix(".txt").read_text(encoding="utf-8").strip()
        yield str(file), {"prompt": text, "image": file.name}


def _questions(row: Mapping[str, Any], place: str, number: int, root: Path) -> Iterator[Question]:
    """The questions of a row; pictures without a mark stand before the first words of the user."""
    named: list[str] = []
    turns = list(_turns(row, place, named))
    listed = row.get("images", row.get("image"))
    listed = [] if listed is None else [listed] if isinstance(listed, str) else list(listed)
    pictures = [*named, *listed]
    if not all(isinstance(one, str) and one for one in pictures):
        raise ValueError(f"{place} names a picture that is no file name; give names of files")
    marks = sum(turn.parts.count(None) for turn in turns)
    if not marks and pictures:
        first = next((at for at, turn in enumerate(turns) if turn.role == "user"), 0)
        front = (None,) * len(pictures)
        turns[first] = Turn(turns[first].role, (*front, *turns[first].parts))
    elif marks != len(pictures):
        raise ValueError(
            f"{place} has {marks} marks of pictures ({MARK}) but names {len(pictures)} pictures; "
            "name one for each mark, or take the marks out"
        )
    for at, turn in enumerate(turns):
        if turn.role != "user":
            continue
        if not any(part and part.strip() for part in turn.parts):
            raise ValueError(f"{place} has an empty question; give it some text")
        before = tuple(turns[: at + 1])
        seen = sum(one.parts.count(None) for one in before)
        after = turns[at + 1] if at + 1 < len(turns) else None
        is_answer = after is not None and after.role == "assistant"
        answer = "".join(filter(None, after.parts)) if after is not None and is_answer else None
        shown = tuple(root / one for one in pictures[:seen])
        yield Question(before, shown, answer or None, place, number)


def _turns(row: Mapping[str, Any], place: str, named: list[str]) -> Iterator[Turn]:
    """The turns of a row; names of pictures among their parts go to `named`."""
    if isinstance(row.get("prompt"), str):
        yield _turn("user", row["prompt"], place, named)
        if row.get("answer") is not None:
            yield _turn("assistant", row["answer"], place, named)
        return
    said = row.get("messages", row.get("conversations"))
    if not isinstance(said, list) or not said:
        raise ValueError(
            f"{place} has neither a prompt nor messages nor conversations but "
            f"{', '.join(map(str, row)) or 'nothing'}; write it as in docs/training.md"
        )
    for one in said:
        if not isinstance(one, Mapping):
            raise ValueError(f"{place} has a turn that is no object; write it as in the docs")
        role = str(one.get("role", one.get("from")))
        yield _turn(ROLES.get(role, role), one.get("content", one.get("value")), place, named)


def _turn(role: str, content: Any, place: str, named: list[str]) -> Turn:
    """One turn of text with marks, or of a list of parts."""
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"{place} has a turn of {role!r}; roles are system, user and assistant")
    if isinstance(content, str):
        return Turn(role, _marked(content))
    if not isinstance(content, list):
        raise ValueError(f"{place} has a turn whose content is no text; give text or parts")
    parts: list[str | None] = []
    for one in content:
        kind = one.get("type") if isinstance(one, Mapping) else None
        if kind == "text" and isinstance(one.get("text"), str):
            parts += _marked(one["text"])
        elif kind == "image":
            parts.append(None)
            name = one.get("image", one.get("path"))
            if name is not None:
                named.append(name)
        else:
            raise ValueError(
                f"{place} has a part of type {kind!r}; parts are text, and image with the name of "
                "a file"
            )
    return Turn(role, tuple(parts))


def _marked(text: str) -> tuple[str | None, ...]:
    """A text cut at its marks; the line break beside one goes with it."""
    pieces = text.split(MARK)
    parts: list[str | None] = []
    for at, piece in enumerate(pieces):
        words = piece.removeprefix("\n") if at else piece
        words = words.removesuffix("\n") if at + 1 < len(pieces) else words
        parts += ([None] if at else []) + ([words] if words else [])
    return tuple(parts)
