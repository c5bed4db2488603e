"""Rules that verify against another distribution than the target's, and so emit it exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.verifiers.distances import total_variation
from mmspec.verifiers.walk import ratio


class Surrogate(ABC):
    """Speculative sampling with a distribution v = T(p, q) in place of p.

    A token has exactly the distribution v, whatever T is, as long as T does not look at the drafted
    token: accepted with probability 1 - TV(v, q), and TV(v, p) away from the target. A token after
    the last node of a draft comes from p. Deterministic proposals (`Kind.DET`) count as sampled
    from a point mass, so v depends on them.
    """

    lossless: ClassVar[bool] = False

    @abstractmethod
    def mix(self, p: Categorical, q: Categorical) -> Categorical:
        """The distribution v that is emitted; batch shapes (...) as p and q."""

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        return ratio(self.mix(p, q).prob(x), q.prob(x))

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return self.mix(p, q).residual(q)

    def bias(self, p: Categorical, q: Categorical) -> Tensor:  # (...)
        return total_variation(self.mix(p, q).probs, p.probs)
