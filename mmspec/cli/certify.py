"""`mmspec certify`: test whether a recipe is exact, as it claims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from mmspec import bench, recipes, registry
from mmspec.accelerated import Accelerated
from mmspec.bench.certificate import Certificate, Trial
from mmspec.bench.reporting import silent
from mmspec.cli.bench import workload
from mmspec.cli.models import load, select, set_threads
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import (
    console,
    print_error,
    print_json,
    print_table,
    show_progress,
    silence_libraries,
)
from mmspec.recipe import Recipe


def run(
    options: ModelOptions, recipe: str, prompts: int, seeds: int, samples: int, seed: int
) -> None:
    """Test a recipe on tiny models with a known distribution, and on a model if there is one."""
    silence_libraries()
    set_threads(options.threads)
    plan = recipes.get(recipe)
    options = replace(options, recipe=[recipe], seed=seed)
    model, fast, requests, why = _load_model(options, plan, prompts)
    with show_progress(options.json) as report:
        found = bench.certify(
            plan,
            fast,
            requests,
            modality=options.modality if fast is None else fast.modality.name,
            seeds=seeds,
            samples=samples,
            progress=report,
        )
    if options.json:
        print_json({**found.to_dict(), "model": model, "tiny_models_only": why})
    else:
        _show(found)
        if why is not None:
            console().print(f"on tiny models only: {why}", style="dim", markup=False)
    if found.verdict == "refuted":
        failed = ", ".join(c.name for c in found.checks if c.outcome == "refuted")
        print_error(f"{recipe} is refuted by {failed}")
        raise typer.Exit(1)


def _load_model(
    options: ModelOptions, plan: Recipe, prompts: int
) -> tuple[str | None, Accelerated | None, list[Any], str | None]:
    """The given or the bundled model, accelerated, with requests; else none, and why."""
    is_given = options.model is not None or options.drafter is not None
    if options.model is None and options.modality is None:
        options = replace(options, modality=_find_modality(plan))
    try:
        selected = select(options)
        loaded = load(options, selected)
        fast = loaded.accelerate(selected.recipe)
    except ValueError as error:
        if is_given or options.settings:
            raise
        return None, None, [], str(error)
    work = workload(loaded, None, prompts, 1, options.seed)
    return selected.model, fast, list(work.timed), None


def _find_modality(plan: Recipe) -> str | None:
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
    print_table([(c.name, c.outcome, c.detail) for c in found.checks], "check", "outcome", "detail")
    claim = "exact" if found.claims_exact else "lossy"
    console().print(f"\n{found.recipe} claims to be {claim}: [bold]{found.verdict}[/bold]")
    if found.distance is not None and not found.claims_exact:
        console().print(f"{found.distance_of}: {found.distance:.3f}")
