"""Read rows of parquet files with Hugging Face's `datasets`: `pip install mmspec[data]`.

`datasets` converts a file to its own cache on disk, which is mapped into memory, so images are read
when they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEDIA_COLUMNS = ("image", "images", "video", "videos")
_BATCH = 64  # rows that are in memory at once


@dataclass(frozen=True, eq=False)
class StoredBytes:
    """Bytes of an image in a row, read when they are used."""

    table: Any
    row: int
    column: str
    at: int | None  # in a list of images

    def read(self) -> bytes:
        """Read the bytes."""
        found = self.table[self.row : self.row + 1].column(self.column).to_pylist()[0]
        one = found if self.at is None else found[self.at]
        return bytes(one if isinstance(one, bytes) else one["bytes"])


def read_parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file; bytes of images are `StoredBytes`.

    Raises ValueError without the library `datasets`, and for a damaged file.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{file} cannot be read without the library datasets; install mmspec[data], or give "
            "JSON Lines"
        ) from error
    try:
        with _silence(datasets):
            table = datasets.Dataset.from_parquet(str(file)).with_format("arrow")
        starts = range(0, len(table), _BATCH)
        for start in starts:
            for number, row in enumerate(table[start : start + _BATCH].to_pylist(), start):
                yield _replace_bytes(row, table, number)
    except Exception as error:  # whatever its readers raise
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{file} is not a readable parquet file ({reason}); copy it again") from (
            error
        )


@contextmanager
def _silence(datasets: Any) -> Iterator[None]:
    """Without progress bars and messages: errors are raised."""
    shown, level = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def _replace_bytes(row: dict[str, Any], table: Any, number: int) -> dict[str, Any]:
    """Put a `StoredBytes` where the bytes of an image are."""
    for column in MEDIA_COLUMNS:
        value = row.get(column)
        if isinstance(value, list):
            row[column] = [
                StoredBytes(table, number, column, at) if _is_embedded(one) else one
                for at, one in enumerate(value)
            ]
        elif _is_embedded(value):
            row[column] = StoredBytes(table, number, column, None)
    return row


def _is_embedded(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, dict) and bool(value.get("bytes")))
