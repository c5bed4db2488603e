"""Training of small networks that predict acceptance, on drafts of requests of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.acceptance import AcceptanceHead
from mmspec.drafters.shapes import Shape

Head = TypeVar("Head", bound=AcceptanceHead)


class RecordedShape(Protocol):
    """A shape that keeps, for every drafted token, what a head reads and its label."""

    features: list[Tensor]  # (n, F) each
    labels: list[Tensor]  # (n,) each


def record_drafts(
    bind: Callable[[Shape], Any], shape: Any, requests: Sequence[Mapping[str, Any]]
) -> tuple[Tensor, Tensor]:  # (n, F), (n,)
    """Features and labels of all drafts of `requests`, arguments of `generate`.

    `bind` accelerates a model with a draft model and a shape. Raises ValueError where nothing was
    drafted.
    """
    recorded: RecordedShape = shape
    fast = bind(shape)
    for request in requests:
        fast.generate(**request)
    if not sum(map(len, recorded.labels)):
        raise ValueError(
            "no token was drafted, so there is nothing to learn from; give more requests, with "
            "at least 2 new tokens each"
        )
    return torch.cat(recorded.features), torch.cat(recorded.labels)


def fit_head(
    kind: type[Head],
    features: Tensor,
    labels: Tensor,
    steps: int,
    rate: float,
    seed: int,
    weight: float = 1.0,
) -> tuple[Head, float]:
    """Fit a head by binary cross entropy; `weight` is that of accepted tokens. Also the loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = kind()
    optimizer = torch.optim.AdamW(head.parameters(), rate)
    accepted, loss = labels.new_tensor(weight), labels.new_zeros(())
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(
                head(features), labels, pos_weight=accepted
            )
            loss.backward()
            optimizer.step()
    return head.eval(), float(loss.detach())
