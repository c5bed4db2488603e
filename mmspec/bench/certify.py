"""Certify that an exact recipe is lossless, by the tests of its modality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmspec import recipes, registry
from mmspec.accelerated import Accelerated
from mmspec.bench.certificate import Certificate, Trial
from mmspec.bench.reporting import Progress, silent
from mmspec.modality import Modality
from mmspec.recipe import Recipe


def certify(
    recipe: str | Recipe,
    fast: Accelerated | None = None,
    requests: Sequence[Mapping[str, Any]] = (),
    *,
    modality: str | None = None,
    seeds: int = 50,
    samples: int = 6000,
    progress: Progress = silent,
) -> Certificate:
    """Test a recipe on tiny models with known distributions, and on `fast` running `requests`.

    `modality` selects the tiny models, where several modalities decode the same. Raises ValueError
    for a recipe that no modality can test.
    """
    plan = recipes.get(recipe) if isinstance(recipe, str) else recipe
    if (fast is None) == bool(requests):
        raise ValueError("an accelerated model and its requests go together; give both or none")
    trial = Trial(fast, requests, seeds, samples, progress)
    refused: list[str] = []
    for owner in _owners(plan, fast, modality):
        try:
            bound, checks = registry.measures(owner).certify(plan, trial)
        except ValueError as error:
            refused.append(f"{owner.name}: {error}")
            continue
        return Certificate.of(bound, owner.name, list(checks))
    raise ValueError(f"recipe {plan.name or 'custom'!r} cannot be tested; {'; '.join(refused)}")


def _owners(plan: Recipe, fast: Accelerated | None, name: str | None) -> list[Modality]:
    """Return the modalities that may test a recipe, in order of preference."""
    if fast is not None:
        return [fast.modality]
    if name is not None:
        owner = registry.get(name)
        recipes.check_decodes(plan, owner.all_decodes, f"modality {name}")
        return [owner]
    owners = [one for one in registry.modalities().values() if one.decodes == plan.decodes]
    return sorted(owners, key=lambda one: not one.is_general)
