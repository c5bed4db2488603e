"""Keep the tokens whose similarity to the question grows in the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import TokenSelection, top_indices


@dataclass(frozen=True)
class UvPrune(TokenSelection):
    """The share `keep` by the gain in cosine with the question over early layers (ParallelVLM).

    Kong et al. 2026. Their sum over layers 1 to L_e of cosine differences telescopes, so two
    snapshots of the hidden states are enough, and no attention. Reconstructed: L_e, a quarter of
    the layers and at least 2; the mean over the question in place of the sum. keep=1 is the
    identity.
    """

    keep: float = 0.1
    needs: ClassVar[frozenset[str]] = frozenset({"states", "question-states"})

    def select(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        scores = gain(signals["states"], signals["question-states"])
        return top_indices(scores, count)


def gain(states: Tensor, question: Tensor) -> Tensor:  # (2, n, D), (2, T, D) -> (n,)
    """The growth of the mean cosine with the question from the first snapshot to the second."""
    visual = functional.normalize(states.float(), dim=-1)
    text = functional.normalize(question.float(), dim=-1).mean(1)  # of directions, so linear
    cosines = (visual * text[:, None]).sum(-1)
    return cosines[1] - cosines[0]
