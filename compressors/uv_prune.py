"""Keep the tokens that draw nearer to the question in the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import KeptTokens, best


@dataclass(frozen=True)
class UvPrune(KeptTokens):
    """The share `keep` by the gain in cosine with the question over early layers (ParallelVLM).

    Kong et al. 2026. Their sum over layers 1 to L_e of cosine differences telescopes, so two
    snapshots of the hidden states are enough, and no attention. Reconstructed: L_e, a quarter of
    the layers and at least 2; the mean over the question in place of the sum. keep=1 is the
    identity.
    """

    keep: float = 0.1
    needs: ClassVar[frozenset[str]] = frozenset({"states", "question-states"})

    def kept(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        scores = gain(signals["states"], signals["question-states"])
        return best(scores, count)


def gain(states: Tensor, question: Tensor) -> Tensor:  # (2, n, D), (2, T, D) -> (n,)
    """How much the mean cosine with the question grows from the first snapshot to the second."""
    seen = functional.normalize(states.float(), dim=-1)
    asked = functional.normalize(question.float(), dim=-1).mean(1)  # of directions, so linear
    cosines = (seen * asked[:, None]).sum(-1)
    return cosines[1] - cosines[0]
