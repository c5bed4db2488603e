"""What every test stands on: no network, and the same random numbers whichever tests run."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

# transformers reads these when it is imported, which is after this file.
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # HF_HUB_OFFLINE=0 pytest -m hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import mmspec
from mmspec import recipes
from mmspec.bench.tiny import random_drafter
from tests import toys

gc.disable()  # what is imported and collected stays: looking through it again and again is slow


def pytest_collection_finish() -> None:
    """All that there is now outlives every test."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Random weights and inputs of a test do not depend on the tests before it."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed also notes who called, for GPUs
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Toys are too small to share out; more threads only wait for each other."""
    torch.set_num_threads(1)


def unchecked(fast: mmspec.Accelerated) -> mmspec.Accelerated:
    """The same without `mmspec.targets.check`, for tests that count or break forwards."""
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


def partner(recipe: str, family: str, layers: int = 3) -> Any:
    """What a recipe drafts with for a family's toy: a model right in part, a head, or nothing."""
    plan = recipes.get(recipe)
    if not plan.takes_drafter:
        return None
    model = _drafter(family, layers)
    if any(kind.accepts(model) for kind in plan.draft_model):
        return model
    return random_drafter(plan, toys.model(family, layers=layers))
