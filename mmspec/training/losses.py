"""Losses of heads against the distributions of their target; logits (n, V) each, means over n."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cross_entropy(said: Tensor, wanted: Tensor) -> Tensor:  # (n, V) x2 -> ()
    """-sum p log q: what every EAGLE, Hydra and Kangaroo is taught by."""
    loss: Tensor = -(wanted.float().softmax(-1) * said.float().log_softmax(-1)).sum(-1).mean()
    return loss


def top_cross_entropy(said: Tensor, wanted: Tensor, count: int) -> Tensor:
    """The same over the target's `count` likeliest tokens alone (HASS, Zhang et al. 2024)."""
    distribution, index = wanted.float().softmax(-1).topk(min(count, wanted.shape[-1]), -1)
    loss: Tensor = -(distribution * said.float().log_softmax(-1).gather(-1, index)).sum(-1).mean()
    return loss


def mean_divergence(said: Tensor, wanted: Tensor) -> Tensor:
    """KL(p || q), in mean over the vocabulary as well (DREAM)."""
    distribution, own = wanted.float().log_softmax(-1), said.float().log_softmax(-1)
    return (distribution.exp() * (distribution - own)).mean()


def total_variation(said: Tensor, wanted: Tensor) -> Tensor:
    """sum |q - p|, twice the total variation: 2 (1 - acceptance) (ViSpec, stage 2)."""
    gap = said.float().softmax(-1) - wanted.float().softmax(-1)
    return gap.abs().sum(-1).mean()


def list_mle(said: Tensor, wanted: Tensor, count: int = 10) -> Tensor:
    """How unlikely the order of the target's `count` likeliest tokens is (ListMLE; ViSpec).

    -sum_j [s_j - logsumexp over i >= j of s_i], s being the head's logits in the target's order.
    """
    index = wanted.topk(min(count, wanted.shape[-1]), -1).indices
    scores = said.float().gather(-1, index)
    rest = torch.logcumsumexp(scores.flip(-1), -1).flip(-1)
    loss: Tensor = (rest - scores).sum(-1).mean()
    return loss
