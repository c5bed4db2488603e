"""Messages between device and service: tensors as safetensors, the rest JSON, of bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors
from safetensors.torch import load, save
from torch import Tensor

MAX_BODY_BYTES = 64 << 20  # of a request: five minutes of features
MAX_DRAFT_TOKENS, MAX_RANKS, MAX_ROWS = 64, 64, 64
HELLO, BEGIN, CHECK = "/hello", "/begin", "/check"


class InvalidMessage(ValueError):
    """A message that cannot be used."""


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialise the tensors of a request."""
    found: bytes = save(
        {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    )
    return found


def unpack(body: bytes) -> dict[str, Tensor]:
    """Parse tensors. Raises InvalidMessage for other content."""
    try:
        found: dict[str, Tensor] = load(body)
    except (safetensors.SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise InvalidMessage(f"no tensors in {len(body)} bytes ({error})") from None
    return found


def parse(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidMessage for other content."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"no JSON in {len(body)} bytes ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise InvalidMessage(f"a JSON {type(found).__name__}, not an object")
    return found


def check_id_rows(
    value: Any, rows: int, max_length: int, vocabulary: int, name: str
) -> list[list[int]]:
    """Return ids (rows, at most `max_length`). Raises InvalidMessage for other values."""
    if not isinstance(value, list) or len(value) != rows:
        raise InvalidMessage(f"{name} has no {rows} rows")
    for row in value:
        if not isinstance(row, list) or len(row) > max_length:
            raise InvalidMessage(
                f"{name} has a row that is not a list, or is longer than {max_length}"
            )
        if not all(type(token) is int and 0 <= token < vocabulary for token in row):
            raise InvalidMessage(f"{name} has an id outside the vocabulary of {vocabulary}")
    return value


def check_best_ids(
    value: Any, drafted: Sequence[Sequence[int]], ranks: int, vocabulary: int
) -> Any:
    """Return the best ids after the context and every drafted token. Raises InvalidMessage."""
    if not isinstance(value, list) or len(value) != len(drafted):
        raise InvalidMessage(f"a response to {len(drafted)} rows has other rows")
    for best, row in zip(value, drafted, strict=True):
        positions = check_id_rows(best, len(row) + 1, ranks, vocabulary, "a response")
        if not all(positions) or any(len(set(ids)) < len(ids) for ids in positions):
            raise InvalidMessage("a response has a position without ids, or a repeated id")
    return value
