"""Fit the cost model to measured forwards, and compare it with others that it was not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from mmspec.bench.planning.costs import Split
from mmspec.bench.planning.devices import Device
from mmspec.bench.planning.measure import Measured, Sample, Setting, measure
from mmspec.bench.reporting import Progress, Report, describe_environment, silent
from mmspec.bench.studies.shapes import SHAPES

# one shape, small drafts and batches
FITTED = tuple(
    Setting("small", rows, context, length)
    for rows, context, length in (
        *((1, 128, 0), (1, 128, 3), (1, 128, 15), (4, 128, 3), (8, 128, 0), (8, 128, 7)),
        *((1, 768, 0), (1, 768, 7), (2, 384, 3)),
    )
)
# other lengths, batches and contexts, and another shape
HELD_OUT = (
    *(Setting("small", *sizes) for sizes in ((2, 256, 5), (6, 192, 10), (16, 64, 2), (1, 1024, 4))),
    *(Setting("smollm2-135m", *sizes) for sizes in ((1, 128, 0), (1, 128, 5), (2, 192, 3))),
)


@dataclass(frozen=True)
class Fit(Report):
    """A device fitted to measurements. `errors` are predicted over measured seconds, less one."""

    device: Device
    fitted: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    fitted_errors: tuple[float, ...]
    held_out_errors: tuple[float, ...]
    environment: dict[str, Any] = field(default_factory=dict)


def calibrate(repeats: int = 3, progress: Progress = silent) -> Fit:
    """Measure this machine's processor with its present threads, fit the model, and check it."""
    fitted = measure(FITTED, repeats, progress)
    held_out = measure(HELD_OUT, repeats, progress)
    device = fit(fitted)
    return Fit(
        device,
        fitted.samples,
        held_out.samples,
        find_errors(device, fitted.samples),
        find_errors(device, held_out.samples),
        describe_environment(torch.device("cpu")),
    )


def fit(measured: Measured, name: str = "cpu", memory: float = 16e9) -> Device:
    """The rates of arithmetic and memory and the seconds per layer that fit the samples best.

    Least squares of relative errors, with rates above 0; arithmetic and memory traffic add up.
    """
    rows = [_terms(sample) for sample in measured.samples]
    terms = torch.tensor(rows, dtype=torch.float64)
    seconds = torch.tensor([one.seconds for one in measured.samples], dtype=torch.float64)
    flop, byte, layer = _solve(terms / seconds[:, None])
    tiny = 1e-18  # seconds of what the samples do not show
    return Device(
        name,
        flops=1 / max(flop, tiny),
        bandwidth=1 / max(byte, tiny),
        memory=memory,
        bytes_per_value=4,
        overlaps=False,
        layer_seconds=layer,
        round_seconds=measured.round_seconds,
        row_seconds=measured.row_seconds,
        source=f"fitted to {len(rows)} forwards",
    )


def find_errors(device: Device, samples: Sequence[Sample]) -> tuple[float, ...]:
    """Predicted over measured seconds of every sample, less one."""
    return tuple(predict(device, one) / one.seconds - 1 for one in samples)


def predict(device: Device, sample: Sample) -> float:
    """Seconds of the forward of a sample."""
    split = Split(SHAPES[sample.shape], device)
    return split.forward(sample.rows, sample.tokens, sample.context, sample.scored)


def summarise(errors: Sequence[float]) -> tuple[float, float]:
    """Median and maximum of the absolute errors."""
    found = [abs(error) for error in errors]
    return median(found), max(found)


def _terms(sample: Sample) -> tuple[float, float, float]:
    """Operations, bytes and layers of a forward in float32; a tied head is built untied there."""
    shape = replace(SHAPES[sample.shape], tied=False)
    unit = Device("unit", 1.0, 1.0, 1.0, bytes_per_value=4)
    work = list(
        Split(shape, unit).list_work(sample.rows, sample.tokens, sample.context, sample.scored)
    )
    return sum(one.flops for one in work), sum(one.bytes for one in work), float(shape.layers)


def _solve(terms: torch.Tensor) -> list[float]:
    """Factors of the columns, none negative, whose sum is nearest to one in every row."""
    kept = list(range(terms.shape[1]))
    ones = torch.ones(len(terms), dtype=terms.dtype)
    while True:
        scale = terms[:, kept].norm(dim=0)
        found = torch.linalg.lstsq(terms[:, kept] / scale, ones[:, None]).solution[:, 0] / scale
        if bool((found >= 0).all()):
            break
        kept.pop(int((found * scale).argmin()))
    made = [0.0] * terms.shape[1]
    for column, value in zip(kept, found.tolist(), strict=True):
        made[column] = value
    return made
