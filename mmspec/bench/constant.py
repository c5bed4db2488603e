"""A drafter that knows nothing: the control beside which an acceptance must be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mmspec import recipes
from mmspec.api import accelerate
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.length import useful
from mmspec.modality import RunResult
from mmspec.targets.tokens.context import Context

CONTROL = "constant drafter"


@dataclass(frozen=True)
class ConstantDrafter(Drafter):
    """Proposes one and the same token, whatever was said."""

    token: int
    length: int = 5
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    sees: ClassVar[str] = "nothing"

    def begin(self, context: Context) -> None:
        return None

    def propose(self, context: Context, state: None) -> Draft:
        if not useful(context):
            return Draft.empty(context.batch, context.device)
        tokens = torch.full((context.batch, self.length), self.token, device=context.device)
        return Draft.chain(tokens, Kind.DET)

    def observe(
        self, context: Context, state: None, draft: Draft, scores: Scores, kept: Round
    ) -> None:
        return None


def controls(model: Any, answers: Sequence[RunResult], **parts: Any) -> Mapping[str, Any]:
    """A model drafted for by the token that its answers have most often."""
    counted = Counter(token for answer in answers for row in answer.values for token in row)
    drafter = ConstantDrafter(counted.most_common(1)[0][0])
    control = accelerate(model, recipes.get("plain"), drafter=drafter, **parts)
    control.warned = True  # that hardly anything is accepted is what it is for
    return {CONTROL: control}
