"""The metric that separates fast straight motion from slow curves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.codes.trajectories import Trajectories
from mmspec.drafters.actions.kinematics import KinematicMetric, circle_radius, path_length
from tests.toys.policies import SPACE


def arc(radius: float, angle: float = 1.5, count: int = 15) -> Tensor:  # (n, 3)
    """Points of a circle in a tilted plane."""
    turn = torch.linspace(0, angle, count, dtype=torch.float64)
    flat = torch.stack((turn.cos(), turn.sin(), torch.zeros(count)), -1) * radius
    askew = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))[0]
    points: Tensor = flat @ askew.double() + torch.tensor([5.0, -3.0, 2.0])
    return points


@pytest.mark.parametrize("radius", [0.01, 1.0, 40.0])
@pytest.mark.parametrize("angle", [0.5, 1.5, 6.0])
def test_a_circle_has_its_radius(radius: float, angle: float) -> None:
    found = float(circle_radius(arc(radius, angle)))
    assert found == pytest.approx(radius, rel=1e-6)


def test_many_windows_at_once() -> None:
    both = torch.stack((arc(1.0), arc(3.0)))
    assert circle_radius(both).tolist() == pytest.approx([1, 3])


def test_points_on_a_line_have_the_largest_radius() -> None:
    line = torch.arange(15).double()[:, None] * torch.tensor([1.0, 2.0, 3.0])
    assert math.isinf(float(circle_radius(line)))
    assert math.isinf(float(circle_radius(torch.zeros(15, 3))))
    mixed = circle_radius(torch.stack((line, arc(2.0))))
    assert math.isinf(float(mixed[0]))
    assert float(mixed[1]) == pytest.approx(2)


def test_noise_moves_the_radius_little() -> None:
    noise = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)).double() * 1e-3
    assert float(circle_radius(arc(1.0, 3.0, 40) + noise)) == pytest.approx(1, abs=5e-3)


def test_a_circle_is_fitted_to_distances_and_not_to_their_squares() -> None:
    """As descent on the variance of the distances finds it; the noise is within the plane."""
    noise = torch.randn(15, 2, generator=torch.Generator().manual_seed(2)).double() * 0.05
    turn = torch.linspace(0, 2, 15, dtype=torch.float64)
    flat = torch.stack((turn.cos(), turn.sin()), -1) + noise
    centre = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([centre], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        spread: Tensor = (flat - centre).norm(dim=-1).var()
        torch.autograd.backward(spread)
        return spread

    search.step(loss)
    expected = float((flat - centre).norm(dim=-1).mean().detach())
    found = float(circle_radius(torch.cat((flat, torch.zeros(15, 1)), 1)))
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_way_is_the_sum_of_steps() -> None:
    steps = torch.ones(11, 1).double() * torch.tensor([[3.0, 4.0]])
    assert float(path_length(steps.cumsum(0))) == pytest.approx(50)
    back_and_forth = torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    assert float(path_length(back_and_forth)) == 3


def moving(deltas: Tensor) -> Episode:  # (n, 3), of 2 cm
    episode = Episode(SPACE)
    for delta in deltas.double() * 0.02:
        episode.observe(SPACE.normalise(torch.cat((delta, torch.zeros(4)))))
    return episode


def line(speed: float, count: int = 20) -> Tensor:
    return torch.full((count, 3), speed)


def curve(speed: float, count: int = 20) -> Tensor:
    turn = torch.arange(count) * 0.3
    return torch.stack((turn.cos(), turn.sin(), 0 * turn), -1) * speed


def metric(weight: float = 0.5, window: int = 15) -> KinematicMetric:
    walks = [line(0.9), line(0.2), curve(0.9), curve(0.1)]
    rows = [moving(one) for one in walks]
    store = Trajectories.from_episodes(
        [(torch.ones(20, 2), torch.stack(one.actions), None) for one in rows]
    )
    return KinematicMetric.from_store(SPACE, store, window, weight)


def test_quick_lines_score_above_slow_curves() -> None:
    made = metric()
    values = [made.of(moving(one)) for one in (line(0.9), curve(0.9), curve(0.1))]
    assert all(value is not None and 0 <= value <= 1 for value in values)
    quick, swift, slow = (float(value or 0) for value in values)
    assert quick > swift > slow
    assert slow < 0.1


def test_the_weight_decides_what_counts() -> None:
    by_radius, by_way = metric(1.0), metric(0.0)
    slow_line, quick_curve = moving(line(0.1)), moving(curve(0.9))
    assert (by_radius.of(slow_line) or 0) > (by_radius.of(quick_curve) or 0)
    assert (by_way.of(slow_line) or 0) < (by_way.of(quick_curve) or 0)


def test_bounds_are_the_minimum_and_the_95th_percentile_of_all_windows() -> None:
    """In metres; a line counts as the largest radius that is finite. One window is possible."""
    walks = [moving(curve(0.1 + 0.1 * at, 22 - at)) for at in range(8)] + [moving(line(0.2, 15))]
    store = Trajectories.from_episodes(
        [(torch.ones(one.step, 2), torch.stack(one.actions), None) for one in walks]
    )
    found = KinematicMetric.from_store(SPACE, store, 15)
    places = [SPACE.unnormalise(torch.stack(one.actions).float())[:, :3].cumsum(0) for one in walks]
    windows = [one[at : at + 15] for one in places for at in range(len(one) - 14)]
    lengths = [float(path_length(one)) for one in windows]
    radii = [float(circle_radius(one)) for one in windows]
    largest = max(one for one in radii if math.isfinite(one))
    assert math.isinf(max(radii))
    for bounds, values in (
        (found.path_bounds, lengths),
        (found.radius_bounds, [min(one, largest) for one in radii]),
    ):
        expected = np.quantile(values, [0, 0.95])
        assert bounds == pytest.approx(expected.tolist(), rel=1e-6)
        assert bounds[1] < max(values)


def test_a_metric_is_a_weighted_sum_of_shares_of_the_bounds() -> None:
    episode = moving(curve(0.5))
    points = SPACE.unnormalise(torch.stack(episode.actions[-15:]))[:, :3].cumsum(0)
    radius, length = float(circle_radius(points)), float(path_length(points))
    made = KinematicMetric(SPACE, (radius - 1, radius + 1), (length - 1, length + 3), weight=0.2)
    assert made.of(episode) == pytest.approx(0.2 * 0.5 + 0.8 * 0.25)
    beyond = replace(made, radius_bounds=(0, radius / 2), path_bounds=(2 * length, 3 * length))
    assert beyond.of(episode) == pytest.approx(0.2)
    assert replace(made, weight=0.0).of(episode) == pytest.approx(0.25)


def test_a_cold_start_has_no_metric() -> None:
    assert metric().of(moving(line(0.9, 14))) is None
    assert metric().of(moving(line(0.9, 15))) is not None


@pytest.mark.parametrize(("steps", "window"), [(200, 15), (45, 15), (17, 5), (9, 3)])
def test_the_default_window_fits_the_stored_episodes(steps: int, window: int) -> None:
    """A third of the median, or the paper's: 15 of 17 steps would route almost none of them."""
    rows = [moving(line(0.5, length)) for length in (5, steps, 4 * steps)]
    store = Trajectories.from_episodes(
        [(torch.ones(one.step, 2), torch.stack(one.actions), None) for one in rows]
    )
    assert KinematicMetric.from_store(SPACE, store).window == window


def test_a_longer_history_counts_by_its_end() -> None:
    turned = torch.cat((curve(0.1, 30), line(0.9, 15)))
    assert metric().of(moving(turned)) == pytest.approx(metric().of(moving(line(0.9))), abs=1e-6)


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="no stored episode has 30 steps"):
        metric(window=30)
    with pytest.raises(ValueError, match="weight=2"):
        metric(weight=2)
    with pytest.raises(ValueError, match="window=2"):
        metric(window=2)
    one = ActionSpace.from_statistics({"q01": [0], "q99": [1]}, ActionCodes(64, 8))
    store = Trajectories.from_episodes([(torch.ones(20, 2), torch.ones(20, 1), None)])
    with pytest.raises(ValueError, match="the components a0 do not span a plane"):
        KinematicMetric.from_store(one, store)
