"""Repetition-aware sampling: the distribution of two samples, the second after a repetition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from mmspec.distributions.repetition import RepetitionAware

SCORES = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0]]).double()
NUCLEUS: dict[str, Any] = {"top_k": 4, "top_p": 0.9}


def near() -> torch.Tensor:  # (V,)
    ids = torch.zeros(1, 0, dtype=torch.int64)
    cut: torch.Tensor = TopPLogitsWarper(0.9)(ids, TopKLogitsWarper(4)(ids, SCORES))
    return cut.softmax(-1)[0]


@pytest.mark.parametrize(
    ("said", "window", "share", "repeated"),
    [
        ([], 10, 0.1, []),
        ([0, 5], 10, 0.1, [0, 5]),
        ([0, 0, 1], 4, 0.5, [0]),  # two of four
        ([1, 0, 0, 0, 0], 4, 0.1, [0]),  # 1 is out of the window
        ([2] * 3, 10, 0.4, []),
    ],
)
def test_the_distribution_is_that_of_both_draws(
    said: list[int], window: int, share: float, repeated: list[int]
) -> None:
    wanted = torch.zeros(7, dtype=torch.float64)
    whole = SCORES.softmax(-1)[0]
    for token, chance in enumerate(near().tolist()):  # the first draw, and what becomes of it
        if token in repeated:
            wanted += chance * whole
        else:
            wanted[token] += chance
    ids = torch.tensor([said], dtype=torch.int64).view(1, -1)
    found = RepetitionAware(window, share, **NUCLEUS)(ids, SCORES).softmax(-1)[0]
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_a_temperature_is_inside() -> None:
    ids = torch.tensor([[0]])
    cold = RepetitionAware(temperature=0.5, **NUCLEUS)(ids, SCORES)
    torch.testing.assert_close(cold, RepetitionAware(**NUCLEUS)(ids, SCORES / 0.5))


@pytest.mark.parametrize("given", [{"window": 0}, {"share": 2}, {"temperature": 0}])
def test_what_is_no_setting_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give one"):
        RepetitionAware(**given)
