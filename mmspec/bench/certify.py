"""Is a recipe as lossless as it says? Enumeration, equality, frequencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmspec import recipes
from mmspec.api import Accelerated, accelerate
from mmspec.bench.certificate import Certificate, Check, outcome, verdict
from mmspec.bench.certify_images import certify_images
from mmspec.bench.certify_latents import certify_latents
from mmspec.bench.certify_patches import certify_patches
from mmspec.bench.checks import enumeration, frequency
from mmspec.bench.equality import greedy_equality, seeded_equality
from mmspec.bench.frequency import writing
from mmspec.bench.players import Inputs
from mmspec.bench.progress import Progress, silent
from mmspec.bench.tiny import random_drafter, request, tiny
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

PICTURES = ("pixels", "target-features", "prompt")  # sights of what no text model reads


def certify(
    recipe: str | Recipe,
    fast: Accelerated | None = None,
    requests: Sequence[Inputs] = (),
    *,
    room: int = 48,
    seeds: int = 50,
    samples: int = 6000,
    draws: bool = False,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> Certificate:
    """Test a recipe on tiny models, and on `fast` answering `requests` where they are given.

    A recipe that decodes latents is tested on chains with a known answer instead, one that decodes
    patches on pictures with one. With `draws`, and
    where a recipe needs a codebook, the models draw; `requests` are then arguments of
    `generate_images`, and `settings` go with all of them.
    """
    plan = recipes.get(recipe) if isinstance(recipe, str) else recipe
    if plan.decodes == "latents":
        return certify_latents(plan, seeds=seeds, samples=samples, progress=progress)
    if plan.decodes == "patches":
        return certify_patches(plan, seeds=seeds, samples=samples, progress=progress)
    if draws or "codebook" in plan.options:
        own = fast if fast is not None and "generate_images" in fast.session.calls else None
        return certify_images(plan, own, requests, settings, seeds, samples, progress)
    checks = [enumeration(plan, plan.verifier)]
    distance, sampled = frequency(plan, lambda seed: writing(_tiny(plan, seed)), samples, progress)
    checks.append(sampled)
    checks += _equalities(plan, fast, requests, room, seeds, progress)
    return Certificate(plan.name or "custom", plan.exact, verdict(plan, checks), checks, distance)


def _equalities(
    plan: Recipe,
    fast: Accelerated | None,
    requests: Sequence[Inputs],
    room: int,
    seeds: int,
    progress: Progress,
) -> list[Check]:
    """Greedy and seeded equality, on a tiny model where no other was given."""
    if fast is None:
        try:
            fast, requests = _tiny(plan, 0), [request(1)]
        except ValueError as error:
            return [Check("equality", "skipped", f"does not run on a tiny text model: {error}")]
    return [
        _greedy(plan, fast, requests, room, progress),
        _seeded(plan, fast, requests, room, seeds, progress),
    ]


def _greedy(
    plan: Recipe, fast: Accelerated, requests: Sequence[Inputs], room: int, progress: Progress
) -> Check:
    found = greedy_equality(fast, requests, room, progress)
    detail = (
        f"{found.same} of {found.total} answers are those of generate() {found.first_difference}"
    )
    return Check("greedy equality", outcome(plan, found.passed), detail.strip())


def _seeded(
    plan: Recipe,
    fast: Accelerated,
    requests: Sequence[Inputs],
    room: int,
    seeds: int,
    progress: Progress,
) -> Check:
    name = "seeded equality"
    if not isinstance(plan.verifier, Coupled):
        return Check(name, "skipped", "other draws of the same law; see enumeration")
    found = seeded_equality(fast, requests, room, seeds, progress)
    detail = (
        f"{found.same} of {found.total} seeds give plain decoding's tokens {found.first_difference}"
    )
    return Check(name, outcome(plan, found.passed), detail.strip())


def _tiny(plan: Recipe, seed: int) -> Accelerated:
    """The recipe between two tiny models. Raises ValueError where it needs a picture."""
    target = tiny(seed=2 * seed)
    if not plan.takes_drafter:
        return accelerate(target, plan)
    small = random_drafter(plan, target, seed=2 * seed + 1)
    sees = "nothing" if plan.sees in PICTURES else plan.sees
    return accelerate(target, replace(plan, sees=sees), drafter=small)
