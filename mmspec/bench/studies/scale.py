"""Engine efficiency at published model sizes, for a drafter with a given acceptance rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

import torch

from mmspec import recipes
from mmspec.api import accelerate
from mmspec.bench.efficiency import run_and_replay
from mmspec.bench.reporting import Progress, Report, describe_environment, dtype_name, silent
from mmspec.bench.row import tokens_per_target_call
from mmspec.bench.studies.shapes import (
    FixedLength,
    build_model,
    parse_device,
    random_prompt,
)
from mmspec.bench.timing import Ratio, time_run
from mmspec.drafters.oracle import Oracle
from mmspec.errors import check_number
from mmspec.models.placement import check_kernels, parse_dtype

NOTE = (
    "text decoder of that shape with random weights; the drafter is an oracle without cost, whose "
    "tokens are correct with the given probability"
)


@dataclass(frozen=True)
class ScalePoint:
    """One context length at one acceptance rate; plain decoding has none."""

    context: int
    acceptance: float | None
    engine_efficiency: float
    tokens_per_target_call: float
    speedup_end_to_end: float  # over generate()
    speedup_decode: float | None  # over plain decoding in this loop, without prefill
    ideal_speedup: float  # forwards of plain decoding over these, without prefill
    milliseconds_per_token: float
    host_milliseconds_per_round: float


@dataclass(frozen=True)
class Scale(Report):
    """The report of `mmspec bench scale`."""

    shape: str
    parameters: int
    length: int
    points: list[ScalePoint]
    note: str = NOTE
    environment: dict[str, Any] = field(default_factory=dict)
    columns: ClassVar[tuple[str, ...]] = tuple(ScalePoint.__dataclass_fields__)


def scale(
    shape: str,
    *,
    contexts: tuple[int, ...] = (512, 2048),
    rates: tuple[float, ...] = (0.6, 0.8, 0.9),
    length: int = 5,
    max_new_tokens: int = 128,
    batch: int = 1,
    repeats: int = 3,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Scale:
    """Build a model of a shape and measure it; the oracle's tokens come from plain decoding."""
    for context in contexts:
        check_number("context", context, 1, whole=True, example=512)
    for rate in rates:
        check_number("acceptance", rate, 0, 1, example=0.8)
    place = parse_device(device)
    kind = _dtype(dtype, place)
    model = build_model(shape, place, kind, max(contexts) + max_new_tokens + 64, seed)
    points: list[ScalePoint] = []
    total = len(contexts) * (len(rates) + 1)
    for context in contexts:
        inputs = random_prompt(model.config.vocab_size, context, place, batch, seed)
        plain = FixedLength(accelerate(model, "plain"), max_new_tokens)
        tokens = plain.run(inputs).values
        stock = FixedLength(model, max_new_tokens)
        base = median(time_run(stock, inputs, 0, place)[0] for _ in range(repeats + 1))
        bare = _measure(plain, inputs, place, repeats)
        points.append(_point(context, None, bare, bare, base, tokens))
        progress("measure", len(points), total)
        for rate in rates:
            oracle = Oracle(tokens, 1 - rate, length, seed)
            fast = accelerate(model, recipes.get("plain"), drafter=oracle)
            found = _measure(FixedLength(fast, max_new_tokens), inputs, place, repeats)
            points.append(_point(context, rate, found, bare, base, tokens))
            progress("measure", len(points), total)
    where = {**describe_environment(place, batch), "dtype": dtype_name(kind)}
    parameters = sum(weight.numel() for weight in model.parameters())
    return Scale(shape, parameters, length, points, environment=where)


@dataclass(frozen=True)
class _Measured:
    wall: float
    prefill: float
    decode: float
    first: float  # wall seconds of a one-token call
    calls: int
    tokens_per_call: float

    @property
    def decode_wall(self) -> float:
        return self.wall - self.first


def _measure(
    runner: FixedLength, inputs: Mapping[str, Any], device: torch.device, repeats: int
) -> _Measured:
    (pairs,) = run_and_replay([runner], inputs, repeats, 0, device)
    one_token = FixedLength(runner.model, 1)
    first = median(time_run(one_token, inputs, 0, device)[0] for _ in range(repeats))
    stats = runner.run(inputs).stats
    assert stats is not None
    return _Measured(
        median(wall for wall, _ in pairs),
        median(alone.prefill for _, alone in pairs),
        median(alone.decode for _, alone in pairs),
        first,
        stats.target_calls,
        tokens_per_target_call([stats]),
    )


def _point(
    context: int,
    rate: float | None,
    found: _Measured,
    bare: _Measured,
    base: float,
    tokens: list[list[int]],
) -> ScalePoint:
    alone = found.prefill + found.decode
    count = sum(map(len, tokens))
    faster = Ratio.of([bare.decode_wall], [found.decode_wall]) if bare.decode_wall > 0 else None
    return ScalePoint(
        context,
        rate,
        alone / found.wall,
        found.tokens_per_call,
        base / found.wall,
        None if faster is None else faster.median,
        bare.decode / found.decode,
        1e3 * found.wall / count,
        1e3 * (found.wall - alone) / max(found.calls, 1),
    )


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = parse_dtype(name)
    check_kernels(found, device)
    return found
