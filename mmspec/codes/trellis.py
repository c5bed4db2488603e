"""The best path through candidates: Viterbi over scores of places and transitions between them."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.codes.bigrams import Bigrams


def best_path(
    scores: Tensor, first: Tensor, bigrams: Bigrams | None, width: int, weight: float
) -> Tensor:  # (B, n, V), (B,) -> (B, n)
    """The tokens c that maximise sum_i [scores_i(c_i) + weight log A(c_(i-1), c_i)], c_0 = `first`.

    Only the `width` best tokens of each place are candidates (Codec-MTP, Nguyen et al. 2025; the
    score is reconstructed). O(n width^2) instead of O(n V^2), and exact at width V; a constant
    added to the scores of a place changes nothing. No `bigrams`: places do not speak of each other.
    """
    best, token = scores.topk(min(width, scores.shape[-1]), -1)  # (B, n, k) each
    before, total = first[:, None], best.new_zeros(len(best), 1)
    behind: list[Tensor] = []
    for place in range(scores.shape[1]):
        here = token[:, place]
        ways = total[:, :, None].expand(-1, -1, here.shape[1])  # (B, k', k)
        if bigrams is not None:
            step = bigrams.log_prob(before[:, :, None], here[:, None, :])
            ways = ways + weight * step
        total, chosen = ways.max(1)
        total = total + best[:, place]
        behind.append(chosen)
        before = here
    at = total.argmax(-1, keepdim=True)
    path = []
    for place in reversed(range(scores.shape[1])):
        path.append(token[:, place].gather(1, at))
        at = behind[place].gather(1, at)
    return torch.cat(path[::-1], 1)
