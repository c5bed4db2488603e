"""What device and service tell each other: tensors as safetensors, the rest JSON, all bounded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors
from safetensors.torch import load, save
from torch import Tensor

LARGEST = 64 << 20  # bytes of a request: five minutes of features
DRAFTED, RANKS, ROWS = 64, 64, 64  # most tokens of a block, ranks that are told, rows of a request
HELLO, BEGIN, CHECK = "/hello", "/begin", "/check"


class Garbled(ValueError):
    """A message that says nothing that can be used."""


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """A request's tensors as bytes."""
    found: bytes = save(
        {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    )
    return found


def unpack(body: bytes) -> dict[str, Tensor]:
    """Raises Garbled for what holds no tensors."""
    try:
        found: dict[str, Tensor] = load(body)
    except (safetensors.SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise Garbled(f"no tensors in {len(body)} bytes ({error})") from None
    return found


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises Garbled for anything else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"no JSON in {len(body)} bytes ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise Garbled(f"a JSON {type(found).__name__}, no object")
    return found


def rows_of_ids(value: Any, rows: int, longest: int, vocabulary: int, name: str) -> list[list[int]]:
    """Ids (rows, at most `longest`). Raises Garbled where it is anything else."""
    if not isinstance(value, list) or len(value) != rows:
        raise Garbled(f"{name} has no {rows} rows")
    for row in value:
        if not isinstance(row, list) or len(row) > longest:
            raise Garbled(f"{name} has a row that is none, or is longer than {longest}")
        if not all(type(token) is int and 0 <= token < vocabulary for token in row):
            raise Garbled(f"{name} holds what is no id of {vocabulary}")
    return value


def best_of(value: Any, drafted: Sequence[Sequence[int]], ranks: int, vocabulary: int) -> Any:
    """The best ids behind the context and every drafted token. Raises Garbled."""
    if not isinstance(value, list) or len(value) != len(drafted):
        raise Garbled(f"an answer about {len(drafted)} rows has other rows")
    for told, asked in zip(value, drafted, strict=True):
        places = rows_of_ids(told, len(asked) + 1, ranks, vocabulary, "an answer")
        if not all(places) or any(len(set(ids)) < len(ids) for ids in places):
            raise Garbled("an answer names no id, or one twice")
    return value
