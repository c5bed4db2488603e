"""`mmspec certify`: is a recipe what it claims to be?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmspec.cli import drawing
from mmspec.cli import inputs as given
from mmspec.cli.bench_images import gallery
from mmspec.cli.generate import Drafter, Threads
from mmspec.cli.modality import IMAGE, modality_of
from mmspec.cli.output import Json, complain, console, emit, progress, table


def certify(
    recipe: Annotated[str, typer.Argument(help="One of `mmspec recipes`.")],
    model: Annotated[
        str | None, typer.Option(help="Target for the equality tests; the zoo's if it is there.")
    ] = None,
    drafter: Drafter = None,
    modality: Annotated[
        str | None,
        typer.Option(help="image: test it drawing, as recipes that need a codebook always are."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts for greedy equality.")] = 20,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for sampled equality.")] = 50,
    samples: Annotated[int, typer.Option(min=500, help="Samples per frequency test.")] = 6000,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 48,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Prove or refute that a recipe is lossless. Exit code 1 when its claim is refuted."""
    from mmspec import recipes
    from mmspec.api import accelerate
    from mmspec.bench.certify import certify as run

    given.quiet()
    given.set_threads(threads)
    plan = recipes.get(recipe)
    kind = modality_of(modality, model or given.MODEL, recipe)
    draws = plan.decodes == "tokens" and (kind == IMAGE or "codebook" in plan.options)
    fast, requests, settings = None, list[Any](), dict[str, Any]()
    if plan.decodes != "tokens":
        _refuse_models(plan, model, drafter)
    elif draws and (model is not None or _has_zoo(drawing.MODEL)):
        model = model or drawing.MODEL
        studio = drawing.load(model, drafter, [recipe])
        fast, settings = studio.fast(recipe), drawing.settings(model, None, None, None)
        requests = list(gallery(studio, None, prompts, 0, 1, 0).timed)
    elif not draws and (model is not None or _has_zoo(given.MODEL)):
        model = model or given.MODEL
        pair = given.load_pair(model, drafter, recipe)
        fast = accelerate(pair.model, recipe, drafter=pair.drafter)
        requests = _requests(pair, prompts)
    with progress(json) as report:
        found = run(
            plan,
            fast,
            requests,
            room=max_new_tokens,
            seeds=seeds,
            samples=samples,
            draws=draws,
            settings=settings,
            progress=report,
        )
    if json:
        emit({**found.to_dict(), "model": model})
    else:
        table([(c.name, c.outcome, c.detail) for c in found.checks], "check", "outcome", "detail")
        claim = "exact" if found.claims_exact else "lossy"
        console().print(f"\n{recipe} claims to be {claim}: [bold]{found.verdict}[/bold]")
        if found.distance is not None and not found.claims_exact:
            console().print(f"{found.distance_of}: {found.distance:.3f}")
    if found.verdict == "refuted":
        failed = ", ".join(c.name for c in found.checks if c.outcome == "refuted")
        complain(f"{recipe} is refuted by {failed}")
        raise typer.Exit(1)


def _refuse_models(plan: Any, model: str | None, drafter: str | None) -> None:
    if model is not None or drafter is not None:
        raise ValueError(
            f"recipe {plan.name!r} decodes {plan.decodes} and is tested on toys with a known "
            "answer; drop --model and --drafter"
        )


def _has_zoo(model: str) -> bool:
    from pathlib import Path

    return (Path(given.folder(model)) / "config.json").exists()


def _requests(pair: given.Pair, prompts: int) -> list[Any]:
    from mmspec.cli.bench import workload

    return list(workload(pair, None, None, prompts, 1, 0).requests)
