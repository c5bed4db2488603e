"""Times of forwards as `mmspec bench scale` runs them: prompts, and drafts of an oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch

from mmspec import recipes
from mmspec.api import accelerate
from mmspec.bench.forwards import time_forwards
from mmspec.bench.reporting import Progress, silent
from mmspec.bench.studies.shapes import FixedLength, build_model, random_prompt
from mmspec.bench.timing import time_run
from mmspec.drafters.oracle import Oracle

ROUNDS = 4  # measured of every setting, beside the last one, whose draft is cut


@dataclass(frozen=True)
class Setting:
    """A batch of drafts of `length` tokens after a prompt of `context` tokens."""

    shape: str
    rows: int
    context: int
    length: int


@dataclass(frozen=True)
class Sample:
    """Seconds of a forward of `rows` x `tokens` tokens after `context` cached ones."""

    shape: str
    rows: int
    tokens: int
    context: float
    scored: int  # positions of each row that pass the output head
    seconds: float


@dataclass(frozen=True)
class Measured:
    """All samples, and the time of the host beside the forwards: per round, and per row of it."""

    samples: tuple[Sample, ...]
    round_seconds: float
    row_seconds: float = 0.0


@torch.no_grad()
def measure(settings: Iterable[Setting], repeats: int = 2, progress: Progress = silent) -> Measured:
    """Run every setting on this machine's processor, in float32; the fastest run counts.

    Other work on a machine only adds time, so the fastest run is that of the machine alone.
    """
    ordered = sorted(settings, key=lambda one: one.shape)
    samples, rests = list[Sample](), list[tuple[int, float]]()
    model, built = None, ""
    for done, one in enumerate(ordered):
        if one.shape != built:
            model, built = build_model(one.shape, torch.device("cpu"), torch.float32), one.shape
        found, rest = _measure_setting(model, one, repeats)
        samples += found
        rests.append((one.rows, rest))
        progress("measure", done + 1, len(ordered))
    return Measured(tuple(samples), *_split_host(rests))


def _split_host(rests: list[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of the host per round, and per row of it, from those of rounds of some rows."""
    fewest = min(rows for rows, _ in rests)
    first = median(rest for rows, rest in rests if rows == fewest)
    more = [(rest - first) / (rows - fewest) for rows, rest in rests if rows > fewest]
    each = max(median(more), 0.0) if more else 0.0
    return max(first - fewest * each, 0.0), each


def _measure_setting(model: object, one: Setting, repeats: int) -> tuple[list[Sample], float]:
    place = torch.device("cpu")
    inputs = random_prompt(model.config.vocab_size, one.context, place, one.rows)  # type: ignore[attr-defined]
    count = (ROUNDS + 1) * (one.length + 1)
    plain = accelerate(model, "plain")
    fast = plain
    if one.length:
        tokens = FixedLength(plain, count).run(inputs).values
        fast = accelerate(model, recipes.get("plain"), drafter=Oracle(tokens, 0.0, one.length, 0))
    runner = FixedLength(fast, count)
    runs, rests = [], []
    for _ in range(repeats + 1):
        with time_forwards(runner, place) as spent:
            wall = time_run(runner, inputs, 0, place)[0]
        runs.append(spent)
        rests.append((wall - sum(spent)) / len(spent))
    fastest = [min(times) for times in zip(*runs[1:], strict=True)]
    prefill = Sample(one.shape, one.rows, one.context, 0, 1, fastest[0])
    size = one.length + 1
    context = one.context + size * (ROUNDS - 1) / 2
    verify = Sample(one.shape, one.rows, size, context, size, median(fastest[1:ROUNDS]))
    return [prefill, verify], min(rests[1:])
