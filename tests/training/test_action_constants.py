"""Constants fitted to episodes whose best constants are known."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from mmspec.codes.episodes import Episode
from mmspec.codes.trajectories import Trajectories
from mmspec.drafters.actions.kalman import ConstantVelocity, RandomWalk
from mmspec.training.action_constants import (
    FILTERS,
    RecordedEpisodes,
    fit_matches,
    fit_motion,
    forecast_error,
    merge,
)
from tests.toys.policies import SPACE

LENGTH, SIZE = 40, SPACE.size
BIN = 2 / (SPACE.codes.bins - 1)


def recorded(episodes: Iterable[Tensor], deviation: float = 0.0) -> RecordedEpisodes:
    made = []
    for actions in episodes:
        one = Episode(SPACE)
        for at, action in enumerate(actions):
            one.step_deviations = [deviation * (at >= LENGTH // 2)]
            one.observe(action)
        made.append(one)
    return RecordedEpisodes(made, [], [])


def test_a_ramp_is_a_velocity_and_noise_is_averaged() -> None:
    generator = torch.Generator().manual_seed(0)
    ramps = torch.linspace(-0.8, 0.8, LENGTH).double()[:, None] * torch.ones(3, 1, SIZE)
    made, figures = fit_motion(recorded(ramps), SPACE)
    assert made.motion == "constant_velocity"
    assert figures["forecast error, bins"] < 0.05
    assert figures["of the last action"] == pytest.approx(1.6 / (LENGTH - 1) / BIN, rel=1e-2)
    noise = 0.2 * torch.randn(3, LENGTH, SIZE, generator=generator).double()
    made, figures = fit_motion(recorded(noise), SPACE)
    assert (made.motion, made.process) == ("random_walk", 1e-2)  # the least gain
    assert figures["forecast error, bins"] < 0.8 * figures["of the last action"]
    assert figures["forecast error, bins"] < figures["of the default filter"]


def test_windows_as_columns_are_windows_one_by_one() -> None:
    actions = torch.rand(LENGTH, SIZE, generator=torch.Generator().manual_seed(1)).double()
    moves = [at for at, dim in enumerate(SPACE.dims) if dim.group != "gripper"]
    for one in (RandomWalk(1.0, 1.0), ConstantVelocity()):
        errors = [
            (one.ahead(actions[at - 10 : at], 1)[0].clamp(-1, 1) - actions[at])[moves].abs().mean()
            for at in range(10, LENGTH)
        ]
        wanted = float(torch.stack(errors).mean()) / BIN
        assert forecast_error(one, [actions], SPACE, 10) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="no episode has more than 40 actions"):
        forecast_error(FILTERS[0], [actions], SPACE, LENGTH)


def test_the_reference_is_a_percentile_of_the_variability() -> None:
    still = [torch.zeros(LENGTH, SIZE).double()]
    made, figures = fit_motion(recorded(still, deviation=2.0), SPACE, beta=1.0)
    assert (made.reference, figures["median variability"]) == (2.0, 1.0)
    assert fit_motion(recorded(still), SPACE)[0].reference == 1  # nothing deviated: the default


def test_the_threshold_parts_what_fits_from_what_does_not() -> None:
    count = 40
    angles = torch.linspace(0.01, 1, count)
    base = torch.eye(2 * count)
    twins = angles.cos()[:, None] * base[:count] + angles.sin()[:, None] * base[count:]
    off = torch.where(torch.arange(count) < 25, 0, 40)  # the less alike are far off
    moved = torch.zeros(count, SIZE)
    moved[:, 0] = off * BIN
    store = Trajectories.from_episodes(
        [(base[:count], torch.zeros(count, SIZE), None), (twins, moved, None)]
    )
    made, figures = fit_matches(store, SPACE, share=1.0)
    similarity, _ = store.nearest_moments
    assert made.theta is not None
    passed = similarity >= made.theta - 1e-6
    assert 40 <= int(passed.sum()) <= 50  # of both episodes
    assert bool((off.repeat(2)[passed] == 0).all())
    assert figures["acceptable matches"] == pytest.approx(25 / 40)
    none, figures = fit_matches(store, SPACE, bias=-1.0)
    assert (none.theta, figures["matches that pass"]) == (2, 0)
    assert merge(fit_motion(recorded([moved]), SPACE)[0], made).theta == made.theta
