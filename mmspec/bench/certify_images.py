"""Is a recipe as lossless as it says when it draws? The same tests on pictures of a few codes.

What pictures add: a grid, a codebook for the verifiers that need one, and guidance, so that every
law is one of two prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmspec.api import Accelerated, accelerate
from mmspec.bench.certificate import Certificate, Check, outcome, verdict
from mmspec.bench.checks import enumeration, frequency
from mmspec.bench.equality import Side, compare
from mmspec.bench.frequency import drawing
from mmspec.bench.images import PLAIN, Fast, Own
from mmspec.bench.progress import Progress
from mmspec.bench.tiny import random_drafter
from mmspec.bench.tiny_images import CODES, SETTINGS, painted, tiny_painter
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled


def certify_images(
    plan: Recipe,
    fast: Accelerated | None,
    requests: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any] | None,
    seeds: int,
    samples: int,
    progress: Progress,
) -> Certificate:
    """Test a recipe on tiny models that draw, and on `fast` drawing `requests`, where it is given.

    Raises ValueError for a recipe that no tiny model can be bound to.
    """
    small = tiny_pair(plan, 0)
    checks = [enumeration(plan, small.recipe.verifier, CODES)]
    distance, sampled = frequency(
        plan, lambda seed: drawing(tiny_pair(plan, seed)), samples, progress
    )
    checks.append(sampled)
    if fast is None:
        fast, requests, settings = small, [painted(1)], SETTINGS
    checks.append(_greedy(plan, fast, requests, settings or {}, progress))
    checks.append(_seeded(plan, fast, requests, settings or {}, seeds, progress))
    words = "total variation of the first two codes"
    verdict_ = verdict(plan, checks)
    return Certificate(
        plan.name or "custom", plan.exact, verdict_, checks, distance, distance_of=words
    )


def tiny_pair(plan: Recipe, seed: int, **parts: Any) -> Accelerated:
    """The recipe on a tiny model that draws, with another one or a head to draft for it."""
    target = tiny_painter(seed=2 * seed)
    if not plan.takes_drafter:
        return accelerate(target, plan, **parts)
    return accelerate(target, plan, drafter=random_drafter(plan, target, 2 * seed + 1), **parts)


def _greedy(
    plan: Recipe,
    fast: Accelerated,
    requests: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    progress: Progress,
) -> Check:
    """Against the model's own loop where it has one, plain decoding elsewhere."""
    greedy = {**settings, "temperature": 0.0}
    plain = accelerate(fast.model, PLAIN, processor=fast.session.processor)
    has_own = plain.session.image_family.peer is not None
    reference: Side = Own(plain, greedy) if has_own else Fast(plain, greedy)
    pairs: list[tuple[Side, Side]] = [(reference, Fast(fast, greedy))] * len(requests)
    found = compare("greedy", pairs, requests, 0, progress)
    whose = "generate()" if has_own else "plain decoding"
    detail = f"{found.same} of {found.total} pictures are those of {whose} {found.first_difference}"
    return Check("greedy equality", outcome(plan, found.passed), detail.strip())


def _seeded(
    plan: Recipe,
    fast: Accelerated,
    requests: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    seeds: int,
    progress: Progress,
) -> Check:
    name = "seeded equality"
    if not isinstance(plan.verifier, Coupled):
        return Check(name, "skipped", "other draws of the same law; see enumeration")
    sampled = {"temperature": 1.0, **settings}
    plain = accelerate(fast.model, PLAIN, processor=fast.session.processor)
    pairs: list[tuple[Side, Side]] = [
        (Fast(plain, sampled, seed), Fast(fast, sampled, seed)) for seed in range(seeds)
    ]
    asked = [requests[seed % len(requests)] for seed in range(seeds)]
    found = compare("seeds", pairs, asked, 0, progress)
    detail = (
        f"{found.same} of {found.total} seeds give plain decoding's codes {found.first_difference}"
    )
    return Check(name, outcome(plan, found.passed), detail.strip())
