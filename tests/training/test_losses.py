"""Losses against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from mmspec.training import losses


def test_losses_by_hand() -> None:
    said = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5]])
    wanted = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 3.0]])
    p, q = wanted.softmax(-1), said.softmax(-1)
    assert_close(losses.soft_cross_entropy(said, wanted), -(p * q.log()).sum(-1).mean())
    assert_close(losses.total_variation(said, wanted), (p - q).abs().sum(-1).mean())
    two = -(p[0, [0, 2]] * q[0, [0, 2]].log()).sum() - (p[1, [2, 0]] * q[1, [2, 0]].log()).sum()
    assert_close(losses.top_cross_entropy(said, wanted, 2), two / 2)
    assert_close(losses.top_cross_entropy(said, wanted, 9), losses.soft_cross_entropy(said, wanted))
    forward = functional.kl_div(q.log(), p, reduction="mean")  # KL(p || q)
    backward = functional.kl_div(p.log(), q, reduction="mean")
    assert_close(losses.mean_divergence(said, wanted), forward)
    assert abs(float(forward - backward)) > 0.01


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_list_mle_is_the_chance_of_the_targets_order(count: int) -> None:
    """Of drawing its likeliest tokens in their order, without putting any back."""
    generator = torch.Generator().manual_seed(0)
    said, wanted = torch.randn(2, 3, 5, generator=generator).unbind(0)
    expected = []
    for scores, distribution in zip(said, wanted, strict=True):
        order = distribution.argsort(descending=True)[: min(count, 5)]
        weights: Tensor = scores[order].exp()
        chance = torch.stack([weights[at] / weights[at:].sum() for at in range(len(order))])
        expected.append(-chance.log().sum())
    assert_close(losses.list_mle(said, wanted, count), torch.stack(expected).mean())
