"""What a Gaussian leaves over beside another one, on the line where the two differ.

With phi the standard normal density and 0 <= w <= 1, the part of w phi(s - r) above phi(s) lies
right of one crossing c:

    w phi(s - r) > phi(s)   <=>   s > c = r / 2 - ln(w) / r
    excess = integral of (w phi(s - r) - phi(s))+ = w T(c - r) - T(c),   T(x) = 1 - Phi(x)

All in float64, any shapes that broadcast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAST = 1e-30  # stands for r = 0, where the crossing is at infinity (w < 1) or all is equal
_REACH = 10.0  # beyond this from the crossing lies less than 1e-22 of the excess
_HALVINGS = 64


def excess(r: Tensor, w: Tensor) -> Tensor:
    """The mass of (w phi(s - r) - phi(s))+; 1 - 2 Phi(-r / 2) for w = 1."""
    return _right_of(_crossing(r, w), r, w)


def draw(r: Tensor, w: Tensor, uniform: Tensor) -> Tensor:
    """s from the distribution proportional to (w phi(s - r) - phi(s))+, falling in `uniform` (0, 1).

    By bisection of the closed form of its tail, so that it costs no network call and no trial.
    """
    low = _crossing(r, w)
    wanted = uniform * _right_of(low, r, w)
    high = torch.maximum(low, r) + _REACH
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = _right_of(middle, r, w) > wanted
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def _crossing(r: Tensor, w: Tensor) -> Tensor:
    return r / 2 - w.log() / r.clamp_min(_LEAST)


def _right_of(s: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return (w * _tail(s - r) - _tail(s)).clamp_min(0)


def _tail(x: Tensor) -> Tensor:
    return torch.erfc(x * math.sqrt(0.5)) / 2
