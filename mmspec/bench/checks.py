"""Checks of recipes that decode token ids: enumeration, frequencies, equality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmspec.bench.certificate import ALPHA, Check, Trial, outcome
from mmspec.bench.enumeration import TOLERANCE, enumerate_verifier
from mmspec.bench.equality import compare_runners
from mmspec.bench.frequency import Frequencies, Subject, measure_frequencies
from mmspec.draft import Verifier
from mmspec.modality import Runner
from mmspec.recipe import Deferred, Recipe

MODELS = (0, 1)  # seeds of the sampled tiny models
ITSELF = "this recipe is plain decoding itself, so there is no reference"


def enumeration(
    plan: Recipe, verifier: Verifier | Deferred[Verifier], size: int | None = None
) -> Check:
    """Enumerate all drafts, decisions and corrections of a verifier."""
    name = "enumeration"
    if verifier.couples:
        return Check(name, "skipped", "coupled noise cannot be enumerated; see seeded equality")
    if isinstance(verifier, Deferred):
        return Check(name, "skipped", f"the verifier needs a model ({verifier.description})")
    try:
        found = enumerate_verifier(verifier, tuple(verifier.kinds), size)
    except ValueError as error:
        return Check(name, "skipped", str(error))
    detail = (
        f"{found.cases} cases, kinds {', '.join(found.kinds)}: error {found.error:.1e} "
        f"(at most {TOLERANCE:.0e}), distance {found.distance:.3g}"
    )
    return Check(name, outcome(plan, found.is_exact), detail)


def frequency(plan: Recipe, subject_of: Callable[[int], Subject], trial: Trial, unit: str) -> Check:
    """Test the whole loop on tiny models: chi-square of the first three tokens.

    A rejection is repeated once, with four times as many new samples, and only then counts.
    """
    name = "frequencies"
    alpha = ALPHA / len(MODELS)  # Bonferroni
    found: list[Frequencies] = []
    try:
        for seed in MODELS:
            subject = subject_of(seed)
            once = measure_frequencies(subject, trial.samples, seed=seed, progress=trial.progress)
            if not once.passes(alpha):
                many = 4 * trial.samples
                once = measure_frequencies(subject, many, seed=seed + 1000, progress=trial.progress)
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
    description = f"total variation of the first two {unit}"
    return Check(name, outcome(plan, passed), detail, worst.distance, description)


def greedy_equality(
    plan: Recipe,
    reference: Runner | None,  # None = there is none
    runner: Runner,
    requests: Sequence[Mapping[str, Any]],
    trial: Trial,
    reference_name: str,
) -> Check:
    """Compare greedy outputs with those of another decoder."""
    if reference is None:
        return Check("greedy equality", "skipped", ITSELF)
    cases = [(request, 0) for request in requests]
    description = f"outputs equal those of {reference_name}"
    return _equality("greedy", plan, (reference, runner), cases, trial, description)


def seeded_equality(
    plan: Recipe,
    plain: Runner | None,  # None = `runner` is plain decoding
    runner: Runner,
    requests: Sequence[Mapping[str, Any]],
    trial: Trial,
) -> Check:
    """Compare samples with plain decoding of the same seed; exact for coupled noise."""
    if not plan.verifier.couples:
        return Check(
            "seeded equality",
            "skipped",
            "samples are others of the same distribution; see enumeration",
        )
    if plain is None:
        return Check("seeded equality", "skipped", ITSELF)
    cases = [(requests[seed % len(requests)], seed) for seed in range(trial.seeds)]
    return _equality(
        "seeded", plan, (plain, runner), cases, trial, "seeds give plain decoding's output"
    )


def _equality(
    kind: str,
    plan: Recipe,
    both: tuple[Runner, Runner],  # the reference, and the runner that must equal it
    cases: Sequence[tuple[Mapping[str, Any], int]],
    trial: Trial,
    description: str,
) -> Check:
    """Compare two runners; skipped where the drafter failed, as plain decoding took its place."""
    name, found = f"{kind} equality", compare_runners(kind, *both, cases, trial.progress)
    if found.fallback is not None and not found.first_difference:
        return Check(name, "skipped", f"the drafter failed: {found.fallback}")
    detail = f"{found.same} of {found.total} {description} {found.first_difference}"
    return Check(name, outcome(plan, found.is_equal), detail.strip())
