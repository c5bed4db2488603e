"""Models of random weights: for certificates and tests, which need no good model but any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def random_model(make: Callable[[], Any], seed: int) -> Any:
    """What `make` makes, in float32 and eval mode, with wide matrices.

    Its distributions are neither flat nor peaked, and what it says depends on everything it reads.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight.normal_(0.0, 1.2 / weight.shape[1] ** 0.5)
    return model
