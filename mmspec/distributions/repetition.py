"""Repetition-aware sampling as a distribution of one step (VALL-E 2, Chen et al. 2024; CosyVoice 2).

A code is drawn from the nucleus; where it has occurred in the last few, it is thrown away and drawn
anew from the whole distribution. Both draws together have a distribution in closed form, for the
target as for the drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from mmspec.errors import check_number


class RepetitionAware(LogitsProcessor):
    """p(x) = n(x) [x is fresh] + n(W) f(x), of the nucleus n, the whole distribution f, and repeated W.

    A code belongs to W where it is at least `share` of the last `window` tokens; n is f cut to
    `top_k` and then `top_p`. Warpers behind it would change the distribution: leave them off.
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
        thrown = (near * repeated).sum(-1, keepdim=True)
        distribution = near.masked_fill(repeated, 0) + thrown * whole.softmax(-1)
        return distribution.log()
