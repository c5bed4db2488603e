"""How far a relaxed rule takes the output from the target, in closed form and while decoding.

One step draws x from q, keeps it with probability a(x) and else draws from the rule's residual r:

    out(y) = q(y) a(y) + sum over x of q(x) (1 - a(x)) r(y | x)

The *over-accepted mass* E = sum of (q a - p)+ is what acceptance alone emits too often. No residual
brings the distance of out from p below E; norm((p - q)+) reaches it for every acceptance of at
least min(1, p/q) (Li et al. 2026). E is 0 for lossless rules and TV(p, q) where everything is
accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Rule
from mmspec.verifiers.walk import at_token, ratio


@dataclass(frozen=True)
class MeasuredStep:
    """One step of a rule."""

    accept: Tensor  # (..., V) acceptance of every token
    output: Tensor  # (..., V) distribution of the token that comes out
    rejected: Tensor  # (...) probability of a correction
    over_accepted: Tensor  # (...) E
    distance: Tensor  # (...) total variation between output and p


def measure(
    rule: Rule, p: Tensor | Categorical, q: Tensor | Categorical, chunk: int = 256
) -> MeasuredStep:
    """Play every token through `rule`, `chunk` of them at a time.

    Distributions are probabilities (..., V), or `Categorical`, where a hard one is greedy decoding.
    """
    distributions = [
        one if isinstance(one, Categorical) else Categorical.having(one) for one in (p, q)
    ]
    p, q = (one.probs for one in distributions)
    accept = torch.empty_like(p)
    output = torch.zeros_like(p)
    for x in torch.arange(p.shape[-1], device=p.device).split(chunk):
        wanted, proposed = (_repeated(one, len(x)) for one in distributions)
        tested = x.expand(*p.shape[:-1], len(x))
        accept[..., x] = rule.accept(wanted, proposed, tested)
        missed = q[..., x] * (1 - accept[..., x])
        output += (missed[..., None] * rule.residual(wanted, proposed, tested).probs).sum(-2)
    output += q * accept
    return MeasuredStep(
        accept,
        output,
        rejected=1 - (q * accept).sum(-1),
        over_accepted=over_accepted(p, q, accept),
        distance=total_variation(output, p),
    )


def _repeated(distribution: Categorical, count: int) -> Categorical:  # (...) -> (..., count)
    """The distribution, `count` times along a new last axis."""
    shape = (*distribution.batch, count, distribution.size)

    def wide(values: Tensor) -> Tensor:
        return values[..., None, :].expand(shape)

    return Categorical(
        lambda: wide(distribution.scores), distribution.hard, wide(distribution.probs)
    )


def over_accepted(p: Tensor, q: Tensor, accept: Tensor) -> Tensor:  # (..., V) x3 -> (...)
    """E = sum of (q a - p)+."""
    return (q * accept - p).clamp_min(0).sum(-1)


def total_variation(one: Tensor, other: Tensor) -> Tensor:  # (..., V) x2 -> (...)
    """Half the sum of absolute differences."""
    return (one - other).abs().sum(-1) / 2


def excess(p: Tensor, q: Tensor, x: Tensor, accept: Tensor) -> Tensor:
    """What the test of x alone tells of the distance: |a(x) - min(1, p(x)/q(x))|.

    Its mean over x ~ q is E, plus what is accepted less often than by speculative sampling, for
    which corrections from norm((p - q)+) come out too often: with those the distance is never
    above it, and it is E for rules that accept no token less. p and q are (..., V), x and accept
    (...); the answer is (...). Costs nothing beside the test, while E itself needs the acceptance
    of the whole vocabulary.
    """
    return (accept - ratio(at_token(p, x), at_token(q, x))).abs()
