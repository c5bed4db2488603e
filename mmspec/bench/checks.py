"""Checks of recipes that decode token ids: enumeration, frequencies, equality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmspec.bench.certificate import ALPHA, Check, Trial, outcome
from mmspec.bench.enumeration import TOLERANCE, enumerate_verifier
from mmspec.bench.equality import equal
from mmspec.bench.frequency import Frequencies, Subject, frequencies
from mmspec.draft import Verifier
from mmspec.modality import Runner
from mmspec.recipe import Deferred, Recipe

MODELS = (0, 1)  # seeds of the tiny models that are sampled
ITSELF = "this recipe is plain decoding itself, which proves nothing"


def enumeration(
    plan: Recipe, verifier: Verifier | Deferred[Verifier], size: int | None = None
) -> Check:
    """The verifier by itself: all drafts, decisions and corrections."""
    name = "enumeration"
    if verifier.couples:
        return Check(name, "skipped", "coupled noise leaves nothing to enumerate; see the seeds")
    if isinstance(verifier, Deferred):
        return Check(name, "skipped", f"no model made the verifier ({verifier.words})")
    try:
        found = enumerate_verifier(verifier, tuple(verifier.kinds), size)
    except ValueError as error:
        return Check(name, "skipped", str(error))
    detail = (
        f"{found.cases} cases, kinds {', '.join(found.kinds)}: error {found.error:.1e} "
        f"(at most {TOLERANCE:.0e}), distance {found.distance:.3g}"
    )
    return Check(name, outcome(plan, found.passed), detail)


def frequency(plan: Recipe, subject_of: Callable[[int], Subject], trial: Trial, unit: str) -> Check:
    """The whole loop on tiny models: chi-square of the first three tokens.

    An alarm is checked once, with four times as many new samples, and only then counts.
    """
    name = "frequencies"
    alpha = ALPHA / len(MODELS)  # Bonferroni
    found: list[Frequencies] = []
    try:
        for seed in MODELS:
            subject = subject_of(seed)
            once = frequencies(subject, trial.samples, seed=seed, progress=trial.progress)
            if not once.passes(alpha):
                many = 4 * trial.samples
                once = frequencies(subject, many, seed=seed + 1000, progress=trial.progress)
            found.append(once)
    except ValueError as error:
        return Check(name, "skipped", f"does not run on a tiny model: {error}")
    values = ", ".join(f"{one.p_value:.2g} ({one.samples} samples)" for one in found)
    worst = max(found, key=lambda one: one.distance - one.floor)
    detail = (
        f"chi-square on {len(found)} models: p {values}, alpha {alpha:.0e}; distance of two "
        f"{unit} {worst.distance:.3f}, of which {worst.floor:.3f} is chance"
    )
    passed = all(one.passes(alpha) for one in found)
    words = f"total variation of the first two {unit}"
    return Check(name, outcome(plan, passed), detail, worst.distance, words)


def greedy_equality(
    plan: Recipe,
    wanted: Runner | None,  # None = there is no other way to answer
    found: Runner,
    requests: Sequence[Mapping[str, Any]],
    trial: Trial,
    whose: str,
) -> Check:
    """Greedy answers against a reference that is not the recipe itself."""
    if wanted is None:
        return Check("greedy equality", "skipped", ITSELF)
    cases = [(request, 0) for request in requests]
    return _equality("greedy", plan, (wanted, found), cases, trial, f"answers are those of {whose}")


def seeded_equality(
    plan: Recipe,
    plain: Runner | None,  # None = `found` is that itself
    found: Runner,
    requests: Sequence[Mapping[str, Any]],
    trial: Trial,
) -> Check:
    """Samples against plain decoding with the same seed, which coupled noise promises."""
    if not plan.verifier.couples:
        return Check(
            "seeded equality", "skipped", "other draws of the same distribution; see enumeration"
        )
    if plain is None:
        return Check("seeded equality", "skipped", ITSELF)
    cases = [(requests[seed % len(requests)], seed) for seed in range(trial.seeds)]
    return _equality(
        "seeded", plan, (plain, found), cases, trial, "seeds give plain decoding's answer"
    )


def _equality(
    sort: str,
    plan: Recipe,
    both: tuple[Runner, Runner],  # the reference, and who must answer like it
    cases: Sequence[tuple[Mapping[str, Any], int]],
    trial: Trial,
    words: str,
) -> Check:
    """What comparing found; nothing where the drafter failed: what answers then is no recipe."""
    name, told = f"{sort} equality", equal(sort, *both, cases, trial.progress)
    if told.fallback is not None and not told.first_difference:
        return Check(name, "skipped", f"the drafter failed: {told.fallback}")
    detail = f"{told.same} of {told.total} {words} {told.first_difference}"
    return Check(name, outcome(plan, told.passed), detail.strip())
