"""Verification of beams: which drafted beams are those of the target's own beam search."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmspec._hf_beams import BeamSearch
from mmspec.targets.branches import BeamDraft


@dataclass(frozen=True)
class BeamVerdict:
    """The beams after a round, per row: they extend nodes that the target has read."""

    parents: list[list[int]]  # of the newest token of each beam, a node of the draft; [] = finished
    tokens: list[list[int]]  # the newest token of each beam
    accepted: list[int]  # drafted levels that hold all beams


class BeamVerifier(ABC):
    """Advances the searches of all rows by the scores of a draft."""

    lossless: bool

    @abstractmethod
    def verify(
        self, searches: Sequence[BeamSearch], draft: BeamDraft, logits: Tensor
    ) -> BeamVerdict:
        """`logits` (B, q, V) follow the nodes of the draft from its first beam on."""


@dataclass(frozen=True)
class StrictBeams(BeamVerifier):
    """Go on while all beams of the target are among the drafted ones (AtSpeed-S, Lin et al. 2025).

    A level is that of the target's own search, with its scores, whatever was drafted; it is the
    last one of a round if one of its beams was not drafted. So the beams are those of
    `generate(num_beams=N)`.
    """

    lossless: bool = True

    def verify(
        self, searches: Sequence[BeamSearch], draft: BeamDraft, logits: Tensor
    ) -> BeamVerdict:
        verdict = BeamVerdict([], [], [])
        lines = draft.children()
        for row, (search, children) in enumerate(zip(searches, lines, strict=True)):
            parents: list[int] = []
            accepted = 0
            if not search.is_done:
                parents, accepted = _follow(search, children, draft, logits[row])
            verdict.parents.append([] if search.is_done else parents)
            verdict.tokens.append([] if search.is_done else search.tokens)
            verdict.accepted.append(accepted)
        return verdict


def _follow(
    search: BeamSearch,
    children: dict[tuple[int, int], int],
    draft: BeamDraft,
    logits: Tensor,
) -> tuple[list[int], int]:
    """Advance one search; returns the nodes that its beams extend, and the accepted levels."""
    nodes = list(range(draft.first, draft.first + search.num_beams))
    for level in range(draft.depth + 1):
        search.advance(logits[[node - draft.first for node in nodes]])
        parents = [nodes[beam] for beam in search.parents]
        found = [
            children.get((parent, token))
            for parent, token in zip(parents, search.tokens, strict=True)
        ]
        if search.is_done or level == draft.depth or None in found:
            return parents, level
        nodes = [node for node in found if node is not None]
    raise AssertionError("the last level returns")
