"""Messages between device and service: tensors as safetensors, the rest JSON, of bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors
from safetensors.torch import load, save
from torch import Tensor

MAX_DRAFT_TOKENS, MAX_RANKS, MAX_ROWS = 64, 64, 64
MAX_TOKENS = 1 << 15  # of a request: rows x (prompt + new tokens)
HELLO, BEGIN, CHECK = "/hello", "/begin", "/check"


class InvalidMessage(ValueError):
    """A message that cannot be used."""


def check_size(rows: int, tokens: int, max_new_tokens: int) -> None:
    """Check the size of a request. Raises InvalidMessage for one that would block the others."""
    if rows > MAX_ROWS or rows * (tokens + max_new_tokens) > MAX_TOKENS:
        raise InvalidMessage(
            f"{rows} rows of {tokens} tokens and max_new_tokens={max_new_tokens} are more than a "
            f"service takes ({MAX_ROWS} rows; {MAX_TOKENS} tokens in all rows, new ones included); "
            "give fewer rows or tokens"
        )


def pack(tensors: Mapping[str, Tensor], check: Mapping[str, Any]) -> bytes:
    """Serialise the tensors of a request, with its first check."""
    found: bytes = save(
        {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()},
        {CHECK: json.dumps(check)},
    )
    return found


def unpack(body: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parse tensors and a first check. Raises InvalidMessage for other content."""
    try:
        found: dict[str, Tensor] = load(body)
    except (safetensors.SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise InvalidMessage(f"no tensors in {len(body)} bytes ({error})") from None
    header = parse(body[8 : 8 + int.from_bytes(body[:8], "little")])
    check = header.get("__metadata__", {}).get(CHECK)
    if check is None:
        raise InvalidMessage("no first check with the tensors")
    return found, parse(check.encode())


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
