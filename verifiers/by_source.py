"""Separate verifiers for retrieved drafts and those of a head (HeiSD)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.trajectories import Retrieved
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.action_tolerance import KINDS


@dataclass(frozen=True)
class BySource(Verifier):
    """Apply `retrieved` to the rows of a draft that were retrieved, `generated` to the others.

    Lossless if both are.
    """

    retrieved: Verifier
    generated: Verifier
    kinds: ClassVar[tuple[Kind, ...]] = KINDS

    @property
    def lossless(self) -> bool:
        return self.retrieved.lossless and self.generated.lossless

    @property
    def couples(self) -> bool:
        return self.retrieved.couples and self.generated.couples

    @property
    def description(self) -> str:
        return f"retrieved: {self.retrieved.description}; generated: {self.generated.description}"

    def bind_context(self, context: Any) -> Verifier:
        return replace(
            self,
            retrieved=self.retrieved.bind_context(context),
            generated=self.generated.bind_context(context),
        )

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not isinstance(draft.extras, Retrieved):
            return self.generated.verify(draft, scores, noise)
        rows = draft.extras.rows
        one = self.retrieved.verify(draft, scores, noise)
        if bool(rows.all()):
            return one
        other = self.generated.verify(draft, scores, noise)
        assert one.next is not None
        assert other.next is not None
        return Verdict(
            torch.where(rows[:, None], one.path, other.path),
            torch.where(rows, one.length, other.length),
            torch.where(rows, one.next, other.next),
            torch.where(rows, _mass(one), _mass(other)),
        )


def _mass(verdict: Verdict) -> Tensor:  # (B,)
    found = verdict.excess
    return torch.zeros_like(verdict.length, dtype=torch.float64) if found is None else found
