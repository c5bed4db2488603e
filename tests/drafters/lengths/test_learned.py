"""Learned stops decide from distributions and places alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mmspec.distributions.categorical import Categorical
from mmspec.drafters.lengths.learned import Disco, SpecDecPP, StopHead, stop_features
from tests.drafters.driving import context

E1 = torch.tensor([0.5, 0.3, 0.2])


def always(chance: float) -> StopHead:
    """A head that predicts one acceptance everywhere."""
    head = StopHead()
    for weight in head.parameters():
        torch.nn.init.zeros_(weight)
    last: Any = head.net[2]
    torch.nn.init.constant_(last.bias, math.log(chance / (1 - chance)))
    return head


def test_features_of_a_distribution() -> None:
    found = stop_features(Categorical(E1.log()[None, None]), 1)
    wanted = torch.tensor([[1.029653, 0.5, 0.3, math.log(2)]])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_a_draft_ends_where_a_refusal_is_likely() -> None:
    distribution, now = Categorical(E1.log().expand(2, 1, 3)), context([1, 2], [1, 2], room=30)
    for length, wanted in (
        (Disco(always(0.8), 0.7), [True] * 4),
        (Disco(always(0.6), 0.7), [False] * 4),
        (SpecDecPP(always(0.8), 0.5), [True, True, True, False]),  # 1 - 0.8 ** n <= 0.5
    ):
        state = length.begin()
        for _ in range(2):  # every round begins anew
            assert length.budget(state, now) == length.max_length
            masks = [length.draft_mask(state, distribution).tolist() for _ in range(4)]
            assert masks == [[one, one] for one in wanted]


def test_what_is_no_head_is_refused() -> None:
    with pytest.raises(ValueError, match="head is 3; give a StopHead"):
        SpecDecPP(3)  # type: ignore[arg-type]
