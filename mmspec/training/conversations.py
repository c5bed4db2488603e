"""Read training data as questions, from JSON Lines or a folder.

    {"prompt": "What is this?", "image": "cat.png", "answer": "A cat."}
    {"messages": [{"role": "user", "content": "What is this?"}, ...], "images": ["cat.png"]}
    {"conversations": [{"from": "human", "value": "<image>\\nWhat is this?"}, ...], "image": ...}

The second is the chat format of many services, whose contents may be lists of parts; the third is
the format of LLaVA and ShareGPT. Answers are optional where the target generates its own. Each user
turn is a separate question, with the previous turns of the data as its prefix.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmspec.errors import check_is_file, parse_json

MAX_LINE_BYTES = 16 << 20
MARK = "<image>"  # position of an image in a text
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


@dataclass(frozen=True)
class Turn:
    """One message: texts, and None for images."""

    role: str  # system, user or assistant
    parts: tuple[str | None, ...]


@dataclass(frozen=True)
class Question:
    """Turns up to a user's, the images in them, and the answer in the data."""

    turns: tuple[Turn, ...]
    images: tuple[Path, ...]
    answer: str | None
    place: str  # file:line
    row: int  # of the data; questions of one conversation share it


def read_questions(data: Path, images: Path | None = None) -> list[Question]:
    """All questions in a file of JSON Lines, or in a folder.

    A folder holds .jsonl files, or else images, each with its prompt in a .txt file of the same
    name. Image names are relative to `images`, by default the folder of the data. Raises ValueError
    with file and line for invalid rows, and for marks that do not match the images.
    """
    files = data_files(data)
    root = images or (data if data.is_dir() else data.parent)
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}; give --images the folder of the images")
    rows = _rows(files) if files[0].suffix == ".jsonl" else _image_rows(files)
    found = [
        question
        for number, (place, row) in enumerate(rows)
        for question in _questions(row, place, number, root)
    ]
    if not found:
        raise ValueError(f"{data} holds no question; give rows such as those in docs/training.md")
    return found


def data_files(data: Path) -> list[Path]:
    """Find the data files. Raises ValueError where there are none."""
    if data.is_file():
        if data.suffix != ".jsonl":
            raise ValueError(
                f"{data} is not a file of JSON Lines; give --data one that ends in .jsonl"
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
    """Hash names and bytes of the data files, without images."""
    sha = hashlib.sha256()
    for file in data_files(data):
        text = file if file.suffix == ".jsonl" else file.with_suffix(".txt")
        sha.update(file.name.encode() + b"\0" + text.read_bytes())
    return sha.hexdigest()


def _rows(files: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in files:
        check_is_file(file)
        with file.open("rb") as lines:
            bounded = iter(partial(lines.readline, MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(bounded, 1):
                place = f"{file}:{number}"
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(
                        f"{place} has more than {MAX_LINE_BYTES >> 20} MiB; give one question, or "
                        "one conversation, per line"
                    )
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                except ValueError as error:
                    raise ValueError(f"{place} is not JSON ({error}); correct that line") from error
                if not isinstance(row, Mapping):
                    raise ValueError(
                        f"{place} is a {type(row).__name__}, not an object; correct it"
                    )
                yield place, row


def _image_rows(files: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in files:
        text = file.with_suffix(".txt").read_text(encoding="utf-8").strip()
        yield str(file), {"prompt": text, "image": file.name}


def _questions(row: Mapping[str, Any], place: str, number: int, root: Path) -> Iterator[Question]:
    """Yield the questions of a row; images without a mark precede the user's first text."""
    named: list[str] = []
    turns = list(_turns(row, place, named))
    more = row.get("images", row.get("image"))
    more = [] if more is None else [more] if isinstance(more, str) else list(more)
    pictures = [*named, *more]
    if not all(isinstance(one, str) and one for one in pictures):
        raise ValueError(f"{place} has an image that is not a file name; give names of files")
    marks = sum(turn.parts.count(None) for turn in turns)
    if not marks and pictures:
        first = next((at for at, turn in enumerate(turns) if turn.role == "user"), 0)
        front = (None,) * len(pictures)
        turns[first] = Turn(turns[first].role, (*front, *turns[first].parts))
    elif marks != len(pictures):
        raise ValueError(
            f"{place} has {marks} marks of images ({MARK}) but names {len(pictures)} images; "
            "name one for each mark, or remove the marks"
        )
    for at, turn in enumerate(turns):
        if turn.role != "user":
            continue
        if not any(part and part.strip() for part in turn.parts):
            raise ValueError(f"{place} has an empty question; give it some text")
        before = tuple(turns[: at + 1])
        count = sum(one.parts.count(None) for one in before)
        after = turns[at + 1] if at + 1 < len(turns) else None
        is_answer = after is not None and after.role == "assistant"
        answer = "".join(filter(None, after.parts)) if after is not None and is_answer else None
        images = tuple(_locate(one, root, place) for one in pictures[:count])
        yield Question(before, images, answer or None, place, number)


def _locate(name: str, root: Path, place: str) -> Path:
    """The file of an image. Raises ValueError for one outside of the folder of images."""
    if not Path(os.path.abspath(root / name)).is_relative_to(os.path.abspath(root)):
        raise ValueError(
            f"{place} names the image {name}, which is outside of {root}; give --images a folder "
            "that holds all of them"
        )
    return root / name


def _turns(row: Mapping[str, Any], place: str, named: list[str]) -> Iterator[Turn]:
    """Yield the turns of a row; image names in their parts are appended to `named`."""
    if isinstance(row.get("prompt"), str):
        yield _turn("user", row["prompt"], place, named)
        if row.get("answer") is not None:
            yield _turn("assistant", row["answer"], place, named)
        return
    messages = row.get("messages", row.get("conversations"))
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{place} has neither a prompt nor messages nor conversations but "
            f"{', '.join(map(str, row)) or 'nothing'}; write it as in docs/training.md"
        )
    for one in messages:
        if not isinstance(one, Mapping):
            raise ValueError(f"{place} has a turn that is not an object; write it as in the docs")
        role = str(one.get("role", one.get("from")))
        yield _turn(ROLES.get(role, role), one.get("content", one.get("value")), place, named)


def _turn(role: str, content: Any, place: str, named: list[str]) -> Turn:
    """Parse one turn, of text with marks or a list of parts."""
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"{place} has a turn of {role!r}; roles are system, user and assistant")
    if isinstance(content, str):
        return Turn(role, _split_at_marks(content))
    if not isinstance(content, list):
        raise ValueError(f"{place} has a turn whose content is not text; give text or parts")
    parts: list[str | None] = []
    for one in content:
        kind = one.get("type") if isinstance(one, Mapping) else None
        if kind == "text" and isinstance(one.get("text"), str):
            parts += _split_at_marks(one["text"])
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


def _split_at_marks(text: str) -> tuple[str | None, ...]:
    """Split a text at its marks; line breaks next to a mark are removed."""
    pieces = text.split(MARK)
    parts: list[str | None] = []
    for at, piece in enumerate(pieces):
        chunk = piece.removeprefix("\n") if at else piece
        chunk = chunk.removesuffix("\n") if at + 1 < len(pieces) else chunk
        parts += ([None] if at else []) + ([chunk] if chunk else [])
    return tuple(parts)
