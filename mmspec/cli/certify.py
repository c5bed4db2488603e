"""What `mmspec certify` does: is a recipe what it claims to be?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from mmspec import bench, recipes, registry
from mmspec.api import Accelerated
from mmspec.bench.certificate import Certificate, Trial
from mmspec.bench.progress import silent
from mmspec.cli.bench import workload
from mmspec.cli.choosing import choose
from mmspec.cli.inputs import quiet
from mmspec.cli.loaded import load, set_threads
from mmspec.cli.options import Choice
from mmspec.cli.output import complain, console, emit, progress, table
from mmspec.recipe import Recipe


def run(choice: Choice, recipe: str, prompts: int, seeds: int, samples: int, seed: int) -> None:
    """Test a recipe on tiny models with a known answer, and on a model where one is at hand."""
    quiet()
    set_threads(choice.threads)
    plan = recipes.get(recipe)
    choice = replace(choice, recipe=[recipe], seed=seed)
    model, fast, requests, why = _at_hand(choice, plan, prompts)
    with progress(choice.json) as report:
        found = bench.certify(
            plan,
            fast,
            requests,
            modality=choice.modality if fast is None else fast.modality.name,
            seeds=seeds,
            samples=samples,
            progress=report,
        )
    if choice.json:
        emit({**found.to_dict(), "model": model, "tiny_models_only": why})
    else:
        _show(found)
        if why is not None:
            console().print(f"on tiny models only: {why}", style="dim", markup=False)
    if found.verdict == "refuted":
        failed = ", ".join(c.name for c in found.checks if c.outcome == "refuted")
        complain(f"{recipe} is refuted by {failed}")
        raise typer.Exit(1)


def _at_hand(
    choice: Choice, plan: Recipe, prompts: int
) -> tuple[str | None, Accelerated | None, list[Any], str | None]:
    """The model that was named, or the zoo's; none, and why, where the zoo has no pair for it."""
    is_said = choice.model is not None or choice.drafter is not None
    if choice.model is None and choice.modality is None:
        choice = replace(choice, modality=_tester(plan))
    try:
        chosen = choose(choice)
        loaded = load(choice, chosen)
        fast = loaded.fast(chosen.recipe)
    except ValueError as error:
        if is_said or choice.settings:
            raise
        return None, None, [], str(error)
    work = workload(loaded, None, prompts, 1, choice.seed)
    return chosen.model, fast, list(work.timed), None


def _tester(plan: Recipe) -> str | None:
    """The first modality whose tiny models the recipe can be bound to."""
    fitting = [one for one in registry.modalities().values() if one.decodes == plan.decodes]
    for owner in sorted(fitting, key=lambda one: not one.is_general):
        try:
            registry.measures(owner).certify(plan, Trial(None, (), 1, 1, silent))
        except ValueError:
            continue
        return owner.name
    return None


def _show(found: Certificate) -> None:
    table([(c.name, c.outcome, c.detail) for c in found.checks], "check", "outcome", "detail")
    claim = "exact" if found.claims_exact else "lossy"
    console().print(f"\n{found.recipe} claims to be {claim}: [bold]{found.verdict}[/bold]")
    if found.distance is not None and not found.claims_exact:
        console().print(f"{found.distance_of}: {found.distance:.3f}")
