"""What toys draft with, and toys whose forwards nobody checks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

import mmspec
from mmspec import recipes
from mmspec.modalities.common.tiny_models import random_drafter
from tests import toys


def skip_checks(fast: mmspec.Accelerated) -> mmspec.Accelerated:
    """The same without `mmspec.targets.readers.check`, for tests that count or break forwards."""
    fast.session.bound.target = replace(fast.session.bound.target, checks=False)
    return fast


def noisy(family: str, scale: float = 0.04, seed: int = 5, **how: Any) -> Any:
    """A copy of the family's toy with noise on its weights: a drafter that is right in part."""
    copy = toys.model(family, **how)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in copy.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(noise * weight.std() * scale)
    return copy


@cache
def _drafter(family: str, layers: int) -> Any:
    return noisy(family, layers=layers)


def partner(recipe: str, family: str, layers: int = 2) -> Any:
    """What a recipe drafts with for a family's toy: a model right in part, a head, or nothing."""
    plan = recipes.get(recipe)
    if not plan.takes_drafter:
        return None
    model = _drafter(family, layers)
    if any(kind.accepts(model) for kind in plan.draft_model):
        return model
    return random_drafter(plan, toys.model(family, layers=layers))
