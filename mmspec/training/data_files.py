"""Read rows of training data: JSON Lines, JSON arrays, parquet, or a folder of images and texts.

Files are streamed, so that a large JSON array is never in memory as text. What is no row is a
`BadRow`; what ends the reading of a file, such as a damaged array, is a ValueError.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from mmspec.errors import check_is_file, parse_json
from mmspec.training.parquet_files import read_parquet

MAX_LINE_BYTES = 16 << 20  # of a row
KINDS = (".jsonl", ".parquet", ".json")
_CHUNK = 1 << 20  # characters of an array that are read at once


@dataclass(frozen=True, slots=True)
class DataRow:
    """A row as it is in the data."""

    place: str  # file:line
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and why."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place} {self.reason}"


def find_data_files(data: Path) -> list[Path]:
    """Return the file, or the files of a folder. Raises ValueError where there are none.

    Of a folder these are its .jsonl files, or else its .parquet files, or else its .json files, or
    else its images that have a .txt file of the same name.
    """
    if data.is_file():
        if data.suffix not in KINDS:
            raise ValueError(
                f"{data} is not a file of rows; give --data one that ends in {', '.join(KINDS)}"
            )
        return [data]
    if not data.is_dir():
        raise ValueError(f"there is no {data}; give --data a .jsonl file or a folder")
    for kind in KINDS:
        if found := sorted(data.glob(f"*{kind}")):
            return found
    others = sorted(one for one in data.iterdir() if one.suffix not in ("", ".txt"))
    found = [one for one in others if one.with_suffix(".txt").is_file()]
    if not found:
        raise ValueError(
            f"{data} holds neither {', '.join(KINDS)} files nor pictures with a .txt beside each; "
            "give --data another folder"
        )
    return found


def hash_data(data: Path) -> str:
    """Hash names and bytes of the data files, without images."""
    sha = hashlib.sha256()
    for file in find_data_files(data):
        text = file if file.suffix in KINDS else file.with_suffix(".txt")
        sha.update(file.name.encode() + b"\0")
        with text.open("rb") as stream:
            for chunk in iter(partial(stream.read, _CHUNK), b""):
                sha.update(chunk)
    return sha.hexdigest()


def read_rows(data: Path) -> Iterator[DataRow | BadRow]:
    """Yield all rows of a file or a folder. Raises ValueError for damaged files."""
    for file in find_data_files(data):
        check_is_file(file)
        if file.suffix == ".parquet":
            for number, content in enumerate(read_parquet(file), 1):
                yield DataRow(f"{file}:{number}", content)
        elif file.suffix not in KINDS:
            yield _image_row(file)
        elif file.suffix == ".json" and not _has_json_lines(file):
            yield from _array_rows(file)
        else:
            yield from _line_rows(file)


def _image_row(file: Path) -> DataRow | BadRow:
    """An image with its prompt in a text file."""
    text = file.with_suffix(".txt")
    try:
        prompt = text.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        return BadRow(str(text), f"cannot be read as UTF-8 text ({error})")
    return DataRow(str(file), {"prompt": prompt, "image": file.name})


def _line_rows(file: Path) -> Iterator[DataRow | BadRow]:
    with file.open("rb") as stream:
        bounded = iter(partial(stream.readline, MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(bounded, 1):
            place = f"{file}:{number}"
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(MAX_LINE_BYTES)
                size = MAX_LINE_BYTES >> 20
                yield BadRow(place, f"has more than {size} MiB; give one conversation per line")
            elif line.strip():
                try:
                    yield _row(place, parse_json(line))
                except ValueError as error:
                    yield BadRow(place, f"is not JSON ({error}); correct that line")


def _row(place: str, content: Any) -> DataRow | BadRow:
    if isinstance(content, Mapping):
        return DataRow(place, content)
    return BadRow(place, f"is a {type(content).__name__}, not an object; correct it")


def _has_json_lines(file: Path) -> bool:
    """Whether a .json file has one object per line. Raises ValueError for a single object."""
    with file.open("rb") as stream:
        line = stream.readline(MAX_LINE_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not line.startswith(b"{"):
        return False
    try:
        parse_json(line)
    except ValueError as error:
        raise ValueError(
            f"{file} is a JSON object, not an array of rows; give an array, or JSON Lines"
        ) from error
    return True


def _array_rows(file: Path) -> Iterator[DataRow | BadRow]:
    """Yield the elements of a JSON array; a place is the line of the element's first character."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            yield from _ArrayReader(file, stream).rows()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error}); write it again") from error


class _ArrayReader:
    """Reads a JSON array element by element, with a window of the text in memory."""

    def __init__(self, file: Path, stream: Any) -> None:
        self.file, self.stream = file, stream
        self.text, self.at, self.line = "", 0, 1
        self.decoder = json.JSONDecoder()

    def rows(self) -> Iterator[DataRow | BadRow]:
        self._expect("[")
        if self._peek() == "]":
            self.at += 1
        else:
            for number in count(1):
                yield self._element(number)
                if self._expect(",]") == "]":
                    break
        if self._peek():
            raise self._error("text after the end of the array")

    def _element(self, number: int) -> DataRow | BadRow:
        """Decode the next element, of which more text is read until it is complete."""
        self._peek()
        place, size = f"{self.file}:{self.line} (row {number})", _CHUNK
        while True:
            try:
                found, end = self.decoder.raw_decode(self.text, self.at)
                if end < len(self.text) or not self._read(size):  # a number may continue
                    self._move(end)
                    return _row(place, found)
            except json.JSONDecodeError as error:
                if len(self.text) - self.at > MAX_LINE_BYTES or not self._read(size):
                    raise self._error(error.msg) from error
            except (RecursionError, ValueError) as error:
                raise self._error(str(error) or "nested too deeply") from error
            size *= 2

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            end = self.at
            while end < len(self.text) and self.text[end] in " \t\r\n":
                end += 1
            self._move(end)
            if end < len(self.text) or not self._read(_CHUNK):
                return self.text[end : end + 1]

    def _expect(self, characters: str) -> str:
        found = self._peek()
        if not found or found not in characters:
            what = repr(found) if found else "the end of the file"
            raise self._error(f"{what} where {' or '.join(characters)} belongs")
        self.at += 1
        return found

    def _move(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def _read(self, size: int) -> bool:
        """Drop the text that was read and append more; whether there was any."""
        more = self.stream.read(size)
        if more:
            self.text, self.at = self.text[self.at :] + more, 0
        return bool(more)

    def _error(self, reason: str) -> ValueError:
        return ValueError(
            f"{self.file}:{self.line} is not part of a JSON array ({reason}); correct that line, "
            "or give a file of JSON Lines"
        )
