"""`mmspec bench results`: its options; nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmspec.cli.options import Seed, run_function
from mmspec.cli.output import Json


def results(
    modality: Annotated[
        list[str] | None, typer.Option(help="A section of the page; repeatable; default: all.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A system, a recipe or `baselines`; repeatable; default: all."),
    ] = None,
    vlm_model: Annotated[
        str | None, typer.Option(help="Target of the vision-language rows.")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=1, max=100_000, help="Number of requests per row.")
    ] = 4,
    repeats: Annotated[int, typer.Option(min=1, max=10_000, help="Measurements of each row.")] = 2,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Processor threads to use.")] = 1,
    seed: Seed = 0,
    work: Annotated[
        Path, typer.Option(help="Folder of the rows: what is there already is not measured again.")
    ] = Path("results-rows"),
    out: Annotated[
        Path, typer.Option(help="The page (.md); tables as .csv and .json and plots go beside it.")
    ] = Path("docs/results.md"),
    compare: Annotated[
        Path | None, typer.Option(help="The .json of another run: what moved since.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="The .json of an earlier page: sections that --modality leaves out stay as there."
        ),
    ] = None,
    note: Annotated[
        str, typer.Option(help="A sentence for the page, such as what else the machine did.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the rows and their settings only.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure all 47 systems of the survey and the baselines, row by row, into one page.

    An interrupted run goes on where it was when the command is given again.
    """
    effort = {"prompts": prompts, "repeats": repeats, "threads": threads, "seed": seed}
    given = (modality, only, vlm_model, effort, work, out, compare, keep, note, dry_run, json)
    run_function("mmspec.cli.results:run", *given)
