"""SpecHub: two children, one of them always the most likely token of the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmspec.draft import Draft, Kind
from mmspec.verifiers.branches import BranchVerifier, Step
from mmspec.verifiers.greedy_multidraft import verify_top_and_sample


@dataclass(frozen=True)
class SpecHub(BranchVerifier):
    """Transport pairs (top token a, sample x) onto the target (Sun et al. 2024, SpecHub), k = 2.

    The pair {a, x} has mass q'(x) = q(x) / (1 - q(a)). Token x takes up to p(x) of it, the hub a
    takes the remainder, up to p(a); the rest of p is the correction. Lossless. The remainder is
    sum (q' - p)+ = sum (p - q')+, so a takes the same share of it as a child of `GreedyMultiDraft`,
    whose step this is; one child is `Exact`.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.HUB,)

    def step(self, draft: Draft) -> Step:
        if draft.nodes and not draft.is_chain and draft.children().shape[-1] > 2:
            raise ValueError(
                f"SpecHub verifies two children per node, not {draft.children().shape[-1]}; "
                "use GreedyMultiDraft"
            )
        return verify_top_and_sample
