"""The most that any lossless rule can accept of several drafts for one token.

    bound = 1 + min over sets H of tokens of [ p(H) - Pr(all drafts lie in H) ]

the dual of optimal transport between the drafts and the target (Hu et al. 2025; for two independent
drafts Khisti et al. 2024). An analysis tool; `mmspec bench rules` shows it beside what rules reach.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from mmspec.draft import Kind
from mmspec.trees import Tree
from mmspec.verifiers.enumeration import Table, enumerate_drafts

LARGEST = 16  # tokens for which all sets are tried


def acceptance_bound(p: Tensor, q: Table, siblings: int = 1, kind: Kind = Kind.WOR) -> float:
    """The optimal acceptance probability for `siblings` drafts of `q`; p is (V,).

    Every set of tokens is tried, so the vocabulary is small. Raises ValueError for a large one.
    """
    size = p.shape[-1]
    if size > LARGEST:
        raise ValueError(
            f"{size} tokens have too many sets; give at most {LARGEST}, or use sorted_bound for "
            "independent drafts"
        )
    tokens, weight = enumerate_drafts(q, Tree.branching([siblings]), kind)
    first, *others = (1 << tokens).unbind(1)
    sets = reduce(torch.bitwise_or, others, first)
    inside = torch.zeros(1 << size, dtype=torch.float64).index_add_(0, sets, weight)
    mass = torch.zeros(1 << size, dtype=torch.float64)
    mass[1 << torch.arange(size)] = p.double()
    return 1 + float((_sum_subsets(mass, size) - _sum_subsets(inside, size)).min())


def sorted_bound(p: Tensor, q: Tensor, siblings: int) -> Tensor:  # (..., V) x2 -> (...)
    """The same for independent drafts and any vocabulary: the best H is a prefix in order of p/q.

    Checked against `acceptance_bound`, not proved here.
    """
    order = (p / q.clamp_min(torch.finfo(q.dtype).tiny)).argsort(-1)
    rising = p.gather(-1, order).cumsum(-1) - q.gather(-1, order).cumsum(-1).pow(siblings)
    return 1 + rising.amin(-1).clamp_max(0)


def _sum_subsets(values: Tensor, size: int) -> Tensor:  # (2 ** V,) -> of each set, over its subsets
    for bit in range(size):
        pairs = values.view(-1, 2, 1 << bit)
        values = torch.stack((pairs[:, 0], pairs.sum(1)), 1).flatten()
    return values
