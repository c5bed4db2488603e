"""An uninformed drafter: the control for acceptance lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mmspec import recipes
from mmspec.api import accelerate
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.modality import RunResult
from mmspec.targets.tokens.context import Context

CONTROL = "constant drafter"


@dataclass(frozen=True)
class ConstantDrafter(Drafter):
    """Always propose the same token."""

    token: int
    length: int = 5
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    sees: ClassVar[str] = "nothing"

    def begin(self, context: Context) -> None:
        return None

    def propose(self, context: Context, state: None) -> Draft:
        if not max_useful_length(context):
            return Draft.empty(context.batch, context.device)
        tokens = torch.full((context.batch, self.length), self.token, device=context.device)
        return Draft.chain(tokens, Kind.DET)

    def observe(
        self, context: Context, state: None, draft: Draft, scores: Scores, round_: Round
    ) -> None:
        return None


def make_controls(model: Any, results: Sequence[RunResult], **parts: Any) -> Mapping[str, Any]:
    """Accelerate a model with a drafter that proposes the most frequent token of its outputs."""
    counted = Counter(token for result in results for row in result.values for token in row)
    drafter = ConstantDrafter(counted.most_common(1)[0][0])
    control = accelerate(model, recipes.get("plain"), drafter=drafter, **parts)
    control.warned = True  # no warning about its low acceptance
    return {CONTROL: control}
