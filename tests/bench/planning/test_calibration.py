"""The fit recovers a known device, and its times are those of the forwards that are run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmspec.bench.planning.calibration import find_errors, fit, predict, summarise
from mmspec.bench.planning.devices import Device
from mmspec.bench.planning.measure import Measured, Sample, Setting, _split_host, measure

KNOWN = Device(
    "known", 80e9, 8e9, 16e9, bytes_per_value=4, overlaps=False, layer_seconds=2e-4
)  # like one core
SIZES = [(1, 128, 0, 1), (4, 128, 0, 1), (1, 1, 130, 1), (1, 8, 140, 8), (8, 8, 130, 8)]


def samples(device: Device, shape: str = "small") -> tuple[Sample, ...]:
    made = [Sample(shape, *sizes, seconds=1.0) for sizes in SIZES]
    return tuple(replace(one, seconds=predict(device, one)) for one in made)


def test_a_known_device_is_found_again() -> None:
    found = fit(Measured(samples(KNOWN), 1e-3))
    assert found.flops == pytest.approx(KNOWN.flops, rel=1e-6)
    assert found.bandwidth == pytest.approx(KNOWN.bandwidth, rel=1e-6)
    assert found.layer_seconds == pytest.approx(KNOWN.layer_seconds, rel=1e-6)
    assert summarise(find_errors(found, samples(KNOWN, "smollm2-135m")))[1] < 1e-6


def test_another_device_has_errors() -> None:
    slow = replace(KNOWN, flops=KNOWN.flops / 2)
    errors = find_errors(KNOWN, samples(slow))
    assert min(errors) < -0.4
    assert max(errors) < 0


def test_no_constant_is_negative() -> None:
    twisted = [replace(one, seconds=1.0 / one.tokens) for one in samples(KNOWN)]
    found = fit(Measured(tuple(twisted), 0.0))
    assert found.layer_seconds >= 0
    assert found.flops > 0


def test_forwards_of_an_oracle_are_measured() -> None:
    found = measure([Setting("tiny", 2, 16, 3), Setting("tiny", 1, 16, 0)], repeats=1)
    sizes = [(one.rows, one.tokens, one.scored) for one in found.samples]
    assert sizes == [(2, 16, 1), (2, 4, 4), (1, 16, 1), (1, 1, 1)]
    assert all(0 < one.seconds < 10 for one in found.samples)
    assert found.round_seconds >= 0


def test_the_host_is_split_into_rounds_and_rows() -> None:
    each, whole = 2e-4, 1e-3
    rests = [(rows, whole + rows * each) for rows in (2, 2, 4, 8)]
    assert _split_host(rests) == pytest.approx((whole, each))
    assert _split_host([(4, 1e-3)]) == (1e-3, 0.0)
