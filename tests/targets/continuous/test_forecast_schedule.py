"""Schedules as words: F in full, t by forecast, R rejected."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mmspec.targets.continuous.forecast_schedule import (
    Cadence,
    DecayingThreshold,
    ForecastSchedule,
    SampleHistory,
)

DIT = DecayingThreshold(base=0.1, decay=0.01, floor=0.01, least=2, most=5, warm_up=3)
FLUX = DecayingThreshold(base=7.0, decay=0.3, floor=0.1, least=2, most=8, warm_up=3)
VIDEO = DecayingThreshold(base=1.0, decay=0.1, floor=0.1, least=4, most=12, warm_up=1)
INF = float("inf")


def simulate(
    schedule: ForecastSchedule, steps: int, error: Callable[[int], float], rollback: bool = False
) -> str:
    """The course of one sample; `error(step)` is how far off a forecast there would be."""
    past, course = SampleHistory(), ""
    for step in range(steps):
        progress = step / steps
        if schedule.needs_full_step(past, progress):
            past, letter = past.after_full_step(), "F"
        else:
            found = error(step) if schedule.is_checked(past) else None
            if rollback and found is not None and found > schedule.threshold(progress):
                past, letter = past.after_full_step(), "R"
            else:
                past, letter = past.after_forecast(found), "t"
        course += letter
    return course


def _right(step: int) -> float:
    return 0.0


def _wrong(step: int) -> float:
    return INF


@pytest.mark.parametrize(
    ("schedule", "right", "wrong"),
    [
        (DIT, "FtF" + "tttttF" * 3, "FtF" + "tttF" * 4),
        (FLUX, "FtF" + "ttttttttF" * 2, "FtF" + "tttF" * 4),
        (VIDEO, "F" + "ttttttttttttF" * 2, "F" + "tttttF" * 4),
    ],
    ids=["dit", "flux", "video"],
)
def test_published_settings_run_between_two_bounds(
    schedule: DecayingThreshold, right: str, wrong: str
) -> None:
    """One step in full per `most` + 1 where forecasts are right, per `least` + 2 where not."""
    assert simulate(schedule, len(right), _right) == right
    assert simulate(schedule, len(wrong), _wrong) == wrong


def test_an_infinite_threshold_is_a_fixed_cadence() -> None:
    for most in (1, 2, 5):
        schedule = DecayingThreshold(base=INF, least=0, most=most, warm_up=1)
        fixed = Cadence(interval=most + 1, warm_up=1)
        assert simulate(schedule, 30, _wrong) == simulate(fixed, 30, _wrong)


def test_nothing_passes_a_negative_threshold() -> None:
    schedule = DecayingThreshold(base=-1.0, floor=-1.0, least=0)
    assert simulate(schedule, 9, _right, rollback=True) == "F" + "R" * 8


def test_a_cadence_in_words() -> None:
    assert simulate(Cadence(3, 2), 10, _wrong) == "FFttFttFtt"
    assert simulate(Cadence(1, 1), 5, _wrong) == "FFFFF"


def test_rollback_redoes_the_step_that_failed() -> None:
    schedule = replace(DIT, warm_up=1)
    assert simulate(schedule, 7, lambda step: INF if step == 3 else 0.0) == "FtttFtt"
    assert simulate(schedule, 7, lambda step: INF if step == 3 else 0.0, True) == "FttRttt"


def test_the_threshold_decays_to_its_floor() -> None:
    assert DIT.threshold(0.0) == pytest.approx(0.1)
    assert DIT.threshold(0.25) == pytest.approx(0.1 * 0.01**0.25)
    assert DIT.threshold(1.0) == pytest.approx(0.01)
    assert replace(DIT, decay=1e-6).threshold(0.9) == 0.01


@pytest.mark.parametrize("rollback", [False, True])
def test_a_larger_base_never_computes_more(rollback: bool) -> None:
    errors = torch.rand(60, generator=torch.Generator().manual_seed(1)).tolist()
    computed = []
    for base in (0.01, 0.1, 0.3, 0.6, 1.0, INF):
        schedule = DecayingThreshold(base=base, decay=0.9, floor=0.0, least=0, most=40, warm_up=1)
        course = simulate(schedule, 60, errors.__getitem__, rollback)
        computed.append(len(course) - course.count("t"))
    assert computed == sorted(computed, reverse=True)
    assert computed[0] > 2 * computed[-1]


def test_the_past_counts() -> None:
    past = SampleHistory().after_full_step().after_forecast(None).after_forecast(0.5)
    assert past == SampleHistory(3, 2, False, 0.5)
    assert past.after_full_step() == SampleHistory(4, 0, True, None)


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="interval=0"):
        Cadence(0)
    with pytest.raises(ValueError, match="warm_up=0"):
        Cadence(2, 0)
    with pytest.raises(ValueError, match="decay=0"):
        DecayingThreshold(decay=0.0)
    with pytest.raises(ValueError, match="least=6 and most=5"):
        DecayingThreshold(least=6)
    with pytest.raises(ValueError, match="most=0"):
        DecayingThreshold(least=0, most=0)
    assert math.isinf(Cadence().threshold(0.5))
