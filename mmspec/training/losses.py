"""Losses of heads against the distributions of their target; logits (n, V) each, means over n."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:  # (n, V) x2 -> ()
    """-sum p log q: the loss of EAGLE, Hydra and Kangaroo."""
    loss: Tensor = -(target.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1).mean()
    return loss


def top_cross_entropy(logits: Tensor, target: Tensor, count: int) -> Tensor:
    """-sum p log q over the target's `count` most likely tokens (HASS, Zhang et al. 2024)."""
    distribution, index = target.float().softmax(-1).topk(min(count, target.shape[-1]), -1)
    loss: Tensor = -(distribution * logits.float().log_softmax(-1).gather(-1, index)).sum(-1).mean()
    return loss


def mean_divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(p || q), also averaged over the vocabulary (DREAM)."""
    distribution, own = target.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (distribution.exp() * (distribution - own)).mean()


def total_variation(logits: Tensor, target: Tensor) -> Tensor:
    """sum |q - p|, twice the total variation: 2 (1 - acceptance) (ViSpec, stage 2)."""
    gap = logits.float().softmax(-1) - target.float().softmax(-1)
    return gap.abs().sum(-1).mean()


def list_mle(logits: Tensor, target: Tensor, count: int = 10) -> Tensor:
    """Ranking loss of the target's `count` most likely tokens (ListMLE; ViSpec).

    -sum_j [s_j - logsumexp over i >= j of s_i], s being the head's logits in the target's order.
    """
    index = target.topk(min(count, target.shape[-1]), -1).indices
    scores = logits.float().gather(-1, index)
    rest = torch.logcumsumexp(scores.flip(-1), -1).flip(-1)
    loss: Tensor = (rest - scores).sum(-1).mean()
    return loss
