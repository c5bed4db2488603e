"""Extrapolation: what each basis is exact for, and what not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mmspec.drafters.forecast.forecast import Basis, Factors, Newton, Taylor, Timeline

EVEN, UNEVEN = (0, 3, 6, 9), (0, 1, 5, 7)


def extrapolate(
    basis: Basis, steps: Sequence[int], features: Sequence[Tensor], at: int, order: int
) -> Tensor:
    """The forecast at step `at` from features (*F) computed at `steps`."""
    timeline, factors = Timeline.begin(basis, order, 1, features[0].device), Factors()
    for step, feature in zip(steps, features, strict=True):
        factors.record(feature[None], timeline.advance(step, torch.tensor([0])), None)
    return factors.forecast(timeline.weights(at))[0]


def _polynomial(degree: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(degree)
    coefficients = torch.randn(degree + 1, 6, generator=generator, dtype=torch.float64)
    powers = torch.tensor([float(step) ** j for j in range(degree + 1)], dtype=torch.float64)
    return powers @ coefficients


def _gap(basis: Basis, degree: int, order: int, steps: tuple[int, ...], at: int) -> float:
    features = [_polynomial(degree, step) for step in steps]
    found = extrapolate(basis, steps, features, at, order)
    return float((found - _polynomial(degree, at)).abs().max())


@pytest.mark.parametrize("basis", [Taylor(), Newton()], ids=repr)
@pytest.mark.parametrize("steps", [EVEN, UNEVEN])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_affine_features_are_forecast_exactly(
    basis: Basis, steps: tuple[int, ...], order: int
) -> None:
    for at in (10, 14):
        assert _gap(basis, 1, order, steps, at) < 1e-5
    assert _gap(basis, 1, 0, steps, 10) > 0.1  # order 0 repeats the last feature


@pytest.mark.parametrize("steps", [EVEN, UNEVEN])
@pytest.mark.parametrize("degree", [2, 3])
def test_newton_is_exact_for_polynomials_up_to_its_order(
    steps: tuple[int, ...], degree: int
) -> None:
    assert _gap(Newton(), degree, degree, steps, 12) < 1e-3
    assert _gap(Newton(), degree, degree - 1, steps, 12) > 0.1


def test_taylor_misses_quadratics_by_a_known_amount() -> None:
    """With equal spacing h, c k^2 is missed by h k c: differences look back."""
    features = [torch.tensor([2.0 * step**2], dtype=torch.float64) for step in EVEN]
    for ahead in (1, 2, 4):
        found = extrapolate(Taylor(), EVEN, features, EVEN[-1] + ahead, 2)
        missed = found - 2.0 * (EVEN[-1] + ahead) ** 2
        assert missed.item() == pytest.approx(-3.0 * ahead * 2.0, rel=1e-5)


def test_newton_of_order_two_in_closed_form() -> None:
    """F0 + F1 k + F2 k (k + h) / 2, with the differences of equal spacing h."""
    f = torch.randn(3, 4, dtype=torch.float64)
    h, k = 2, 3
    first, second = (f[2] - f[1]) / h, (f[2] - 2 * f[1] + f[0]) / h**2
    want = f[2] + first * k + second * k * (k + h) / 2
    torch.testing.assert_close(extrapolate(Newton(), (0, 2, 4), list(f), 7, 2), want)


@pytest.mark.parametrize("basis", [Taylor(), Newton()], ids=repr)
def test_a_high_order_waits_for_its_steps(basis: Basis) -> None:
    """With two steps known every order from 1 up is the line through them, with one a constant."""
    f = torch.randn(2, 4, dtype=torch.float64)
    line = extrapolate(basis, (0, 2), list(f), 5, 1)
    torch.testing.assert_close(line, f[1] + 1.5 * (f[1] - f[0]))
    assert torch.equal(extrapolate(basis, (0, 2), list(f), 5, 4), line)
    assert torch.equal(extrapolate(basis, (2,), [f[1]], 5, 4), f[1])


@pytest.mark.parametrize("basis", [Taylor(), Newton()], ids=repr)
def test_rows_have_histories_of_their_own(basis: Basis) -> None:
    """A batch whose rows were computed at other steps forecasts like its rows alone."""
    histories = [(0, 1, 2, 5), (0, 3), (0,)]
    timeline, factors = Timeline.begin(basis, 2, 3, torch.device("cpu")), Factors()
    features = torch.randn(6, 3, 4, dtype=torch.float64)
    for step in range(6):
        due = [row for row, history in enumerate(histories) if step in history]
        if due:
            rows = torch.tensor(due)
            scale = timeline.advance(step, rows)
            factors.record(features[step, rows], scale, None if len(due) == 3 else rows)
    found = factors.forecast(timeline.weights(7))
    for row, history in enumerate(histories):
        alone = extrapolate(basis, history, [features[step, row] for step in history], 7, 2)
        torch.testing.assert_close(found[row], alone)


def test_forecasts_share_no_memory_with_what_was_recorded() -> None:
    feature = torch.randn(1, 4)
    factors = Factors()
    timeline = Timeline.begin(Taylor(), 0, 1, feature.device)
    factors.record(feature, timeline.advance(0, torch.tensor([0])), None)
    kept = feature.clone()
    factors.forecast(timeline.weights(1)).zero_()
    assert torch.equal(feature, kept)


def test_a_negative_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order=-1 must be a whole number"):
        Timeline.begin(Taylor(), -1, 1, torch.device("cpu"))
