"""Is a recipe as lossless as it says? Enumeration, equality, frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmspec import recipes
from mmspec.api import Accelerated, accelerate
from mmspec.bench.certificate import ALPHA, Certificate, Check, outcome, verdict
from mmspec.bench.certify_latents import certify_latents
from mmspec.bench.enumeration import TOLERANCE, enumerate_verifier
from mmspec.bench.equality import greedy_equality, seeded_equality
from mmspec.bench.frequency import Frequencies, frequencies
from mmspec.bench.players import Inputs
from mmspec.bench.progress import Progress, silent
from mmspec.bench.tiny import request, tiny
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

MODELS = (0, 1)  # seeds of the tiny models that are sampled


def certify(
    recipe: str | Recipe,
    fast: Accelerated | None = None,
    requests: Sequence[Inputs] = (),
    *,
    room: int = 48,
    seeds: int = 50,
    samples: int = 6000,
    progress: Progress = silent,
) -> Certificate:
    """Test a recipe on tiny models, and on `fast` answering `requests` where they are given.

    A recipe that decodes latents is tested on chains with a known answer instead.
    """
    plan = recipes.get(recipe) if isinstance(recipe, str) else recipe
    if plan.decodes == "latents":
        return certify_latents(plan, seeds=seeds, samples=samples, progress=progress)
    checks = [_enumeration(plan)]
    distance, sampled = _frequencies(plan, samples, progress)
    checks.append(sampled)
    checks += _equalities(plan, fast, requests, room, seeds, progress)
    return Certificate(plan.name or "custom", plan.exact, verdict(plan, checks), checks, distance)


def _enumeration(plan: Recipe) -> Check:
    """The verifier by itself: all drafts, decisions and corrections."""
    name = "enumeration"
    if isinstance(plan.verifier, Coupled):
        return Check(name, "skipped", "coupled noise leaves nothing to enumerate; see the seeds")
    try:
        found = enumerate_verifier(plan.verifier, tuple(plan.verifier.kinds))
    except ValueError as error:
        return Check(name, "skipped", str(error))
    detail = (
        f"{found.cases} cases, kinds {', '.join(found.kinds)}: error {found.error:.1e} "
        f"(at most {TOLERANCE:.0e}), distance {found.distance:.3g}"
    )
    return Check(name, outcome(plan, found.passed), detail)


def _frequencies(plan: Recipe, samples: int, progress: Progress) -> tuple[float | None, Check]:
    """The whole loop on tiny models: chi-square of the first three tokens.

    An alarm is checked once, with four times as many new samples, and only then counts.
    """
    name = "frequencies"
    alpha = ALPHA / len(MODELS)  # Bonferroni
    found: list[Frequencies] = []
    try:
        for seed in MODELS:
            fast = _tiny(plan, seed)
            once = frequencies(fast, samples, seed=seed, progress=progress)
            if not once.passes(alpha):
                once = frequencies(fast, 4 * samples, seed=seed + 1000, progress=progress)
            found.append(once)
    except ValueError as error:
        return None, Check(name, "skipped", f"does not run on a tiny text model: {error}")
    values = ", ".join(f"{one.p_value:.2g} ({one.samples} samples)" for one in found)
    worst = max(found, key=lambda one: one.distance - one.floor)
    detail = (
        f"chi-square on {len(found)} models: p {values}, alpha {alpha:.0e}; distance of two "
        f"tokens {worst.distance:.3f}, of which {worst.floor:.3f} is chance"
    )
    passed = all(one.passes(alpha) for one in found)
    return worst.distance, Check(name, outcome(plan, passed), detail)


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
    sees = plan.sees if plan.sees in ("auto", "nothing", "placeholders") else "nothing"
    return accelerate(target, replace(plan, sees=sees), drafter=tiny(layers=1, seed=2 * seed + 1))
