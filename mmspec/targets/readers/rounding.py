"""Compare the scores of two readings of the same tokens: how much may rounding change them?

The unit is the spread of the best scores at a position, so that one margin serves all models.
"""

from __future__ import annotations

import torch
from torch import Tensor

BEST = 64  # scores compared per position: those of excluded tokens would dominate


def rounding_margin(dtype: torch.dtype) -> float:
    """The tolerated difference of two readings, in units of the spread of the best scores.

    Float32: 2e-3, at the worst position; recurrent layers differ by that much between one token and
    several. Float64: the same, as their states and norms are computed in float32. Half precision:
    0.05 (float16), 0.13 (bfloat16), at the median position.
    """
    seen = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    return float((1.5 if seen.bits < 32 else 6) * seen.eps**0.5)


def score_difference(ours: Tensor, theirs: Tensor) -> Tensor:  # (..., V) each -> scalar
    """Difference of the best scores at the worst position, in units of their spread.

    At the median position in half precision, where a mixture of experts may resolve ties otherwise.
    """
    best = theirs.float().topk(min(BEST, theirs.shape[-1]), -1)
    apart = (ours.float().gather(-1, best.indices) - best.values).square().mean(-1).sqrt()
    places = (apart / best.values.std(-1).clamp_min(1e-6)).flatten()
    is_half = torch.finfo(theirs.dtype).bits < 32
    return places.nan_to_num(torch.inf).median() if is_half else places.nan_to_num(torch.inf).amax()
