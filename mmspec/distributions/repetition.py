"""Repetition-aware sampling in closed form (VALL-E 2, Chen et al. 2024; CosyVoice 2).

A code is sampled from the nucleus. If it occurs among the last few codes, it is sampled again from
the full distribution. Both steps together have a closed-form distribution, computed here for target
and drafter alike.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from mmspec.errors import check_number


class RepetitionAware(LogitsProcessor):
    """p(x) = n(x) [x not in W] + n(W) f(x), with nucleus n and full distribution f.

    W are the repeated codes: at least `share` of the last `window` tokens. n is f cut to `top_k`
    and then `top_p`. Warpers applied after it would change the distribution; do not add any.
    """

    def __init__(
        self,
        window: int = 10,
        share: float = 0.1,
        temperature: float = 1.0,
        top_k: int = 25,
        top_p: float = 0.8,
    ) -> None:
        check_number("window", window, 1, whole=True, example=10)
        check_number("share", share, 0, 1, example=0.1)
        check_number("temperature", temperature, 1e-8, 1e8)
        self.window, self.share, self.temperature = window, share, temperature
        self.nucleus = (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (R, L), (R, V) -> (R, V)
        whole = scores / self.temperature
        cut = whole
        for warper in self.nucleus:
            cut = warper(input_ids, cut)
        near = cut.softmax(-1)
        counts = torch.zeros_like(near)
        last = input_ids[:, -self.window :]
        counts.scatter_add_(-1, last, torch.ones_like(last, dtype=counts.dtype))
        repeated = counts >= max(self.window * self.share, 1)
        resampled = (near * repeated).sum(-1, keepdim=True)
        distribution = near.masked_fill(repeated, 0) + resampled * whole.softmax(-1)
        return distribution.log()
