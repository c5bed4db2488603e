"""Predicted speeds for numbers of devices: how to split them, how many tokens to draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmspec.bench.planning.costs import Decoding, Split, eagle_head, expected_tokens
from mmspec.bench.planning.devices import Device
from mmspec.bench.reporting import Report
from mmspec.bench.studies.shapes import SHAPES
from mmspec.errors import check_number

MAX_LENGTH = 12
LATENCY, THROUGHPUT = "latency", "throughput"
GAIN = 1.02  # over plain decoding, below which speculation does not pay
DRAFT_SLOTS = 64  # of a request, as the engine counts


@dataclass(frozen=True)
class Point:
    """The best way found for one goal. Speeds are of output tokens."""

    goal: str  # latency of one request, or throughput of all devices
    devices: int
    context: int
    acceptance: float
    tensor: int  # devices that a target is split over
    replicas: int
    rows: int  # requests at a time on each
    length: int  # drafted tokens of a round; 0: none
    tokens_per_second: float  # of all devices, prompts included
    ms_per_token: float  # of one request while it is decoded
    first_token_ms: float  # of a prompt that is read alone
    speedup: float  # over the same with no draft
    pays_up_to: int  # rows at which a draft still gains 2 %


@dataclass(frozen=True)
class DevicePlan(Report):
    """All points, and what does not fit."""

    shape: str
    device: Device
    output: int
    points: tuple[Point, ...]
    skipped: tuple[str, ...]


def make_plan(
    shape: str,
    device: Device,
    *,
    devices: Sequence[int] = (1, 8, 64),
    contexts: Sequence[int] = (2048, 32768, 131072),
    acceptances: Sequence[float] = (0.6, 0.9),
    output: int = 256,
) -> DevicePlan:
    """Predict the speed of a shape with an EAGLE head, for every combination.

    `contexts` are tokens of prompts, `output` those that follow. Raises ValueError for an unknown
    shape and for values out of range.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; known shapes: {', '.join(SHAPES)}")
    for name, values in (("devices", devices), ("context", contexts)):
        for value in values:
            check_number(name, value, 1, whole=True, example=8)
    for rate in acceptances:
        check_number("acceptance", rate, 0, 1, example=0.8)
    check_number("output", output, 1, whole=True, example=256)
    points, skipped = list[Point](), list[str]()
    for count in devices:
        for context in contexts:
            found = [
                point
                for acceptance in acceptances
                for point in _find_best(shape, device, count, context, acceptance, output)
            ]
            if not found:
                skipped.append(
                    f"{count} {device.name} do not hold the weights and one request of "
                    f"{context + output} tokens"
                )
            points += found
    return DevicePlan(shape, device, output, tuple(points), tuple(skipped))


def best_length(decoding: Decoding, rows: int, context: float, acceptance: float) -> int:
    """The draft length of most tokens per second of a round."""

    def speed(length: int) -> float:
        return expected_tokens(length, acceptance) / decoding.round(rows, length, context)

    return max(range(MAX_LENGTH + 1), key=speed)


def find_break_even(decoding: Decoding, context: float, acceptance: float, most: int) -> int:
    """The largest number of rows, a power of two, at which a draft gains `GAIN`; 0 for none."""
    largest = 0
    for rows in _powers(most):
        length = best_length(decoding, rows, context, acceptance)
        gain = expected_tokens(length, acceptance) * decoding.round(rows, 0, context)
        if gain / decoding.round(rows, length, context) < GAIN:
            break
        largest = rows
    return largest


def make_decoding(shape: str, device: Device, tensor: int = 1) -> Decoding:
    """A target of a shape split over devices, and an EAGLE head that is whole on each."""
    target = Split(SHAPES[shape], device, tensor)
    return Decoding(target, Split(eagle_head(target.shape), device))


def _find_best(
    shape: str, device: Device, devices: int, context: int, acceptance: float, output: int
) -> Iterator[Point]:
    """The best points for latency and for throughput, where one request fits."""
    points = [
        point
        for tensor in _list_splits(shape, device, devices)
        for point in _list_points(
            make_decoding(shape, device, tensor), devices, context, acceptance, output
        )
    ]
    if points:
        yield min((one for one in points if one.goal == LATENCY), key=lambda one: one.ms_per_token)
        yield max(
            (one for one in points if one.goal == THROUGHPUT), key=lambda one: one.tokens_per_second
        )


def _list_splits(shape: str, device: Device, devices: int) -> Iterator[int]:
    for tensor in _powers(devices):
        try:
            Split(SHAPES[shape], device, tensor)
            device.all_reduce(1.0, tensor)
        except ValueError:
            continue
        yield tensor


def _list_points(
    decoding: Decoding, devices: int, context: int, acceptance: float, output: int
) -> Iterator[Point]:
    """One row, and every power of two that the memory holds."""
    tensor = decoding.target.devices
    replicas, middle = devices // tensor, context + output / 2
    most = decoding.max_slots // (context + output + DRAFT_SLOTS)
    limit = find_break_even(decoding, middle, acceptance, most) if most else 0
    for rows in _powers(most):
        length = best_length(decoding, rows, middle, acceptance)
        speeds = [
            _find_speed(decoding, rows, one, context, output, acceptance) for one in (length, 0)
        ]
        tokens = expected_tokens(length, acceptance)
        shared = (devices, context, acceptance, tensor, replicas, rows, length)
        values = (
            replicas * speeds[0],
            1e3 * decoding.round(rows, length, middle) / tokens,
            1e3 * decoding.prefill(1, context),
            speeds[0] / speeds[1],
            limit,
        )
        if rows == 1:
            yield Point(LATENCY, *shared, *values)
        yield Point(THROUGHPUT, *shared, *values)


def _find_speed(
    decoding: Decoding, rows: int, length: int, context: int, output: int, acceptance: float
) -> float:
    """Tokens per second of one replica: every request has its prompt read, and its rounds."""
    one = decoding if length else Decoding(decoding.target)
    rounds = output / expected_tokens(length, acceptance)
    seconds = rows * one.prefill(1, context) + rounds * one.round(
        rows, length, context + output / 2
    )
    return rows * output / seconds


def _powers(most: int) -> Iterator[int]:
    value = 1
    while value <= most:
        yield value
        value *= 2
