"""Sample a diffusion pipeline plainly and speculatively, and compare images and speed.

    python demos/diffusion.py                        # the bundled pipeline, one row per prompt
    python demos/diffusion.py --model DIR --prompt "a red square" --recipe asd --recipe paradigms

Writes a sheet of images with the same seeds, and a plot of the steps accepted in each round.
Columns after "plain" share its noise: an exact recipe leaves its trajectory at a rejected draft and
samples another image of the same distribution. Columns after "pipeline" share the noise of the
pipeline's own loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

import mmspec
from mmspec import recipes
from mmspec.cli.models import LoadedModels, load_models
from mmspec.cli.output import show_progress
from mmspec.draft import Round
from mmspec.drafters.denoising.window import Window
from mmspec.modalities.common.sheets import Panel, sheet
from mmspec.modalities.diffusion.image_distance import compare_images
from mmspec.tracing.palette import SERIES

console = Console(highlight=False)
RECIPES = (
    *("asd", "accelerated-diffusion-carried", "accelerated-diffusion", "block-diffusion"),
    *("paradigms", "taylorseer", "speca"),
)
PROMPTS = (
    "a large red circle in the center",
    "a small blue square at the top and a large green star at the bottom",
    "a large yellow triangle on the left",
)
OWN = ("plain", "pipeline")
MARGIN, LINE = 8, 13  # pixels
WIDE, HIGH, EDGE, NAMES = 800, 220, 32, 200  # size of a plot, its margin, space for the legend
Points = list[tuple[float, float]]


def main(
    model: Annotated[str, typer.Option(help="zoo:diffusion, or a pipeline.")] = "zoo:diffusion",
    drafter: Annotated[str | None, typer.Option(help="For recipes with a drafter.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Sampling steps.")] = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder for the two images.")] = Path(),
) -> None:
    """Sample an image of every prompt plainly and with every recipe."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    try:
        given = {} if steps is None else {"steps": steps}
        loaded = _load(model, drafter, recipe or RECIPES, given)
        columns = _columns(loaded, recipe or RECIPES)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    prompts = prompt or list(PROMPTS)
    requests = [loaded.formatter.request([text]) for text in prompts]
    for fast in columns.values():
        fast(**requests[0], seed=seed)  # warm-up
    results: dict[str, list[PipelineResult]] = {}
    with show_progress(False) as bar:
        for index, (name, fast) in enumerate(columns.items()):
            bar("recipes", index, len(columns))
            results[name] = [_sample_image(fast, one, seed) for one in requests]
    panels = {
        name: [Panel(one.picture, (one.label,)) for one in row] for name, row in results.items()
    }
    sheet(panels, prompts).save(out / "diffusion-pictures.png")
    written = ["diffusion-pictures.png"]
    chains = {name: row[0].rounds for name, row in results.items() if row[0].rounds}
    if chains:
        _plots(chains).save(out / "diffusion-rounds.png")
        written.append("diffusion-rounds.png")
    _table(results)
    console.print(f"written to {out.resolve()}: {', '.join(written)}")


@dataclass(frozen=True)
class PipelineResult:
    """An image and its cost."""

    picture: Any
    label: str
    calls: int
    rows: int | None  # of the network; None for forecasts
    seconds: float
    rounds: list[tuple[int, int]]  # (network calls, accepted steps); empty for forecasts


def _load(
    model: str, drafter: str | None, chosen: Sequence[str], given: dict[str, Any]
) -> LoadedModels:
    """Load the pipeline and its draft pipeline; without one, drop the recipes that need it."""
    try:
        return load_models(model, "diffusion", drafter, chosen, **given)
    except ValueError as error:
        free = [name for name in chosen if not recipes.get(name).takes_drafter]
        if not free or len(free) == len(chosen):
            raise
        found = load_models(model, "diffusion", None, free, **given)
        needy = [name for name in chosen if name not in free]
        console.print(f"without {', '.join(needy)}: {error}", style="yellow")
        return found


def _columns(loaded: LoadedModels, names: Sequence[str]) -> dict[str, Any]:
    """Return the columns: recipes of chains after "plain", forecasts after "pipeline"."""
    chosen, pipe = loaded.selection.recipes, loaded.model
    of_chains = [name for name in names if isinstance(recipes.get(name).execution, Window)]
    chains = [name for name in chosen if name in of_chains]
    forecasts = [name for name in chosen if name not in chains]
    columns = {}
    if of_chains:
        columns["plain"] = mmspec.accelerate(pipe, "paradigms", window=1)  # drafts nothing
        columns |= {name: loaded.accelerate(name) for name in chains}
    if forecasts:
        columns["pipeline"] = mmspec.accelerate(pipe, "taylorseer", lite=True, interval=1)
        columns |= {name: loaded.accelerate(name) for name in forecasts}
    return columns


def _sample_image(fast: Any, request: dict[str, Any], seed: int) -> PipelineResult:
    rounds: list[tuple[int, int]] = []

    def note(one: Round) -> None:
        rounds.append((one.calls, len(one.tokens[0])))

    is_chain = isinstance(fast.recipe.execution, Window)
    callback = {"on_round": note} if is_chain else {}
    start = perf_counter()
    picture = fast(**request, seed=seed, output_type="pil", **callback).images[0]
    seconds, stats = perf_counter() - start, fast.last_stats
    if is_chain:
        label = f"{stats.target_calls} calls, {stats.network_rows} rows"
        return PipelineResult(
            picture, label, stats.target_calls, stats.network_rows, seconds, rounds
        )
    label = f"{stats.target_calls} full, {stats.num_accepted_draft_tokens} forecast"
    return PipelineResult(picture, label, stats.target_calls, None, seconds, rounds)


def _plots(chains: dict[str, list[tuple[int, int]]]) -> Image.Image:
    """Plot, for the first prompt, accepted steps per round, and total steps over network calls."""
    plots = Image.new("RGB", (WIDE, 2 * HIGH), "white")
    pen = ImageDraw.Draw(plots)
    per_round: dict[str, Points] = {}
    in_all: dict[str, Points] = {}
    for name, rounds in chains.items():
        taken, calls = 0, 0
        per_round[name], in_all[name] = [], [(0, 0)]
        for cost, moved in rounds:
            per_round[name] += [(taken, moved), (taken + moved, moved)]
            taken, calls = taken + moved, calls + cost
            in_all[name].append((calls, taken))
    _panel(pen, 0, per_round, "steps taken per round", "steps of the chain")
    _panel(pen, HIGH, in_all, "steps taken", "network calls")
    return plots


def _panel(pen: Any, top: int, lines: dict[str, Points], up: str, across: str) -> None:
    """Draw lines over one pair of axes that start at 0, with a legend."""
    limits = [max(point[axis] for line in lines.values() for point in line) for axis in (0, 1)]

    wide, high = WIDE - EDGE - NAMES, HIGH - 2 * EDGE

    def at(x: float, y: float) -> tuple[float, float]:
        return EDGE + wide * x / limits[0], top + EDGE + high * (1 - y / limits[1])

    pen.line([at(0, limits[1]), at(0, 0), at(limits[0], 0)], fill="black")
    pen.text((EDGE - 10, at(0, 0)[1] + 2), "0", fill="black")
    pen.text((EDGE + wide - 100, at(0, 0)[1] + 2), f"{limits[0]:g} {across}", fill="black")
    pen.text((EDGE, at(0, limits[1])[1] - LINE - 4), f"{limits[1]:g} {up}", fill="black")
    for index, (name, points) in enumerate(lines.items()):
        colour = SERIES[index % len(SERIES)]
        shifted = [(x, y - index) for x, y in (at(*point) for point in points)]
        pen.line(shifted, fill=colour, width=2)  # lines on top of each other stay visible
        pen.text((EDGE + wide + MARGIN, top + EDGE + LINE * index), name, fill=colour)


def _table(results: dict[str, list[PipelineResult]]) -> None:
    table = Table("per picture", "calls", "rows", "seconds", "claims", box=None)
    for name, row in results.items():
        numbers = [mean(one.calls for one in row), mean(one.rows or 0 for one in row)]
        seconds = mean(one.seconds for one in row)
        claim = "exact" if name in OWN or recipes.get(name).exact else _measure_loss(results, name)
        calls, rows = (f"{number:.1f}" if number else "" for number in numbers)
        table.add_row(name, calls, rows, f"{seconds:.2f}", claim)
    console.print(table)


def _measure_loss(results: dict[str, list[PipelineResult]], name: str) -> str:
    """Compare the images of a lossy recipe with the reference images of the same noise."""
    own = "plain" if results[name][0].rounds else "pipeline"
    pair = (np.stack([_to_array(one.picture) for one in results[key]]) for key in (own, name))
    distance = compare_images(*pair)
    if distance.psnr is None:
        return "lossy, none lost"
    ink = "" if distance.psnr_on_ink is None else f", {distance.psnr_on_ink:.1f} on ink"
    return f"lossy, PSNR {distance.psnr:.1f} dB{ink}"


def _to_array(picture: Image.Image) -> np.ndarray:  # (H, W, 3) in [0, 1]
    return np.asarray(picture.convert("RGB")) / 255


if __name__ == "__main__":
    typer.run(main)
