"""Checks that certificates of writing and of drawing share: enumeration and frequencies."""

from __future__ import annotations

from collections.abc import Callable

from mmspec.bench.certificate import ALPHA, Check, outcome
from mmspec.bench.enumeration import TOLERANCE, enumerate_verifier
from mmspec.bench.frequency import Frequencies, Subject, frequencies
from mmspec.bench.progress import Progress
from mmspec.draft import Verifier
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

MODELS = (0, 1)  # seeds of the tiny models that are sampled


def enumeration(plan: Recipe, verifier: Verifier, size: int | None = None) -> Check:
    """The verifier by itself: all drafts, decisions and corrections."""
    name = "enumeration"
    if isinstance(verifier, Coupled):
        return Check(name, "skipped", "coupled noise leaves nothing to enumerate; see the seeds")
    try:
        found = enumerate_verifier(verifier, tuple(verifier.kinds), size)
    except ValueError as error:
        return Check(name, "skipped", str(error))
    detail = (
        f"{found.cases} cases, kinds {', '.join(found.kinds)}: error {found.error:.1e} "
        f"(at most {TOLERANCE:.0e}), distance {found.distance:.3g}"
    )
    return Check(name, outcome(plan, found.passed), detail)


def frequency(
    plan: Recipe, subject_of: Callable[[int], Subject], samples: int, progress: Progress
) -> tuple[float | None, Check]:
    """The whole loop on tiny models: chi-square of the first three tokens.

    An alarm is checked once, with four times as many new samples, and only then counts.
    """
    name = "frequencies"
    alpha = ALPHA / len(MODELS)  # Bonferroni
    found: list[Frequencies] = []
    try:
        for seed in MODELS:
            subject = subject_of(seed)
            once = frequencies(subject, samples, seed=seed, progress=progress)
            if not once.passes(alpha):
                once = frequencies(subject, 4 * samples, seed=seed + 1000, progress=progress)
            found.append(once)
    except ValueError as error:
        return None, Check(name, "skipped", f"does not run on a tiny model: {error}")
    values = ", ".join(f"{one.p_value:.2g} ({one.samples} samples)" for one in found)
    worst = max(found, key=lambda one: one.distance - one.floor)
    detail = (
        f"chi-square on {len(found)} models: p {values}, alpha {alpha:.0e}; distance of two "
        f"tokens {worst.distance:.3f}, of which {worst.floor:.3f} is chance"
    )
    passed = all(one.passes(alpha) for one in found)
    return worst.distance, Check(name, outcome(plan, passed), detail)
