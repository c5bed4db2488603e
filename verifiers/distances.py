"""Distance of a relaxed rule's output from the target, in closed form and while decoding.

One step samples x from q, accepts it with probability a(x) and else samples from the residual r:

    out(y) = q(y) a(y) + sum over x of q(x) (1 - a(x)) r(y | x)

The *over-accepted mass* E = sum of (q a - p)+ is the mass that acceptance alone emits in excess. It
is a lower bound of the distance between out and p for any residual; norm((p - q)+) reaches it for
every acceptance of at least min(1, p/q) (Li et al. 2026). E is 0 for lossless rules and TV(p, q)
where everything is accepted.

A rule that knows the distance in closed form has a method `bias` (`ClosedForm`), which is then what
a run reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Rule
from mmspec.verifiers.walk import gather_token, ratio


@dataclass(frozen=True)
class MeasuredStep:
    """One step of a rule."""

    accept: Tensor  # (..., V) acceptance of every token
    output: Tensor  # (..., V) distribution of the output token
    rejected: Tensor  # (...) probability of a correction
    over_accepted: Tensor  # (...) E
    distance: Tensor  # (...) total variation between output and p


def measure(
    rule: Rule, p: Tensor | Categorical, q: Tensor | Categorical, chunk: int = 256
) -> MeasuredStep:
    """Apply `rule` to every token, `chunk` of them at a time.

    Distributions are probabilities (..., V) or `Categorical`; hard ones are greedy decoding.
    """
    distributions = [
        one if isinstance(one, Categorical) else Categorical.from_probs(one) for one in (p, q)
    ]
    p, q = (one.probs for one in distributions)
    accept = torch.empty_like(p)
    output = torch.zeros_like(p)
    for x in torch.arange(p.shape[-1], device=p.device).split(chunk):
        target, draft = (_repeat(one, len(x)) for one in distributions)
        tested = x.expand(*p.shape[:-1], len(x))
        accept[..., x] = rule.accept(target, draft, tested)
        missed = q[..., x] * (1 - accept[..., x])
        output += (missed[..., None] * rule.residual(target, draft, tested).probs).sum(-2)
    output += q * accept
    return MeasuredStep(
        accept,
        output,
        rejected=1 - (q * accept).sum(-1),
        over_accepted=over_accepted(p, q, accept),
        distance=total_variation(output, p),
    )


def _repeat(distribution: Categorical, count: int) -> Categorical:  # (...) -> (..., count)
    """Repeat the distribution `count` times along a new last axis."""
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


def accepted_or(p: Tensor, q: Tensor, accept: Tensor, instead: Tensor) -> Tensor:  # -> (...)
    """Total variation between p and the output, where corrections come from `instead`.

    The output is q a + (1 - sum q a) r for any acceptance a and any r that does not depend on the
    refused token. All are (..., V).
    """
    kept = q * accept
    return total_variation(kept + (1 - kept.sum(-1, keepdim=True)) * instead, p)


@runtime_checkable
class ClosedForm(Protocol):
    """A rule whose distance from the target is known in closed form."""

    def bias(self, p: Categorical, q: Categorical) -> Tensor:
        """(...) total variation between p and the output of one step with drafts from q."""


def excess(p: Tensor, q: Tensor, x: Tensor, accept: Tensor) -> Tensor:
    """The estimate of the distance from the test of x alone: |a(x) - min(1, p(x)/q(x))|.

    Its mean over x ~ q is E plus the mass that is accepted less often than by speculative sampling.
    With corrections from norm((p - q)+) the distance is at most this mean, and it equals E for
    rules that accept no token less often. p and q are (..., V), x, accept and the result (...). E
    itself would need the acceptance of the whole vocabulary.
    """
    return (accept - ratio(gather_token(p, x), gather_token(q, x))).abs()
