"""`mmspec bench overlap | schedules`: their options; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated

import typer

from mmspec.cli.options import PARTS, Count, Prompts, Repeats, model_command


@model_command(
    "mmspec.cli.schedules:overlap", "bench", without=("recipe", "verifier", "overrides", *PARTS)
)
def overlap(
    prompt: Prompts = None,
    prompts: Count = 4,
    repeats: Repeats = 3,
    window: Annotated[
        list[int] | None, typer.Option(max=1024, help="Tokens per target forward; repeatable.")
    ] = None,
    refill: Annotated[
        bool, typer.Option("--refill", help="After a rejection wait for a whole window.")
    ] = False,
) -> None:
    """Draft while the target verifies: the gain here, and predicted for two devices."""


@model_command(
    "mmspec.cli.schedules:schedules", "bench", without=("recipe", "verifier", "overrides", *PARTS)
)
def schedules(
    prompt: Prompts = None,
    prompts: Count = 4,
    ratio: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Time of a target forward over a drafted token; repeatable."),
    ] = None,
    stages: Annotated[
        list[int] | None,
        typer.Option(min=1, max=1024, help="Stages of the target's pipeline; repeatable."),
    ] = None,
) -> None:
    """Drafting beside a target in stages (PipeInfer, AMUSD, PEARL): speed on a simulated clock."""
