"""Speculative sampling of a diffusion pipeline, seen side by side.

    python demos/diffusion.py                        # the bundled pipeline, one row per prompt
    python demos/diffusion.py --model DIR --prompt "a red square" --recipe asd --recipe paradigms

Writes a sheet of pictures with the same seeds, and a plot of how far each round of a recipe moved.
Columns behind "plain" have its noise: exact recipes leave its picture where a draft is rejected,
for another one of the same distribution. Columns behind "pipeline" have the noise of its own loop.
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
from mmspec.cli.loaded import Loaded, opened
from mmspec.cli.output import progress
from mmspec.draft import Round
from mmspec.drafters.denoising.window import Window
from mmspec.modalities.common.sheets import Panel, sheet
from mmspec.modalities.diffusion.picture_distance import apart

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
WIDE, HIGH, EDGE, NAMES = 800, 220, 32, 200  # of a plot, around it, and on its right
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8e5ea2", "#e9a23b", "#444444")
Points = list[tuple[float, float]]


def main(
    model: Annotated[str, typer.Option(help="zoo:diffusion, or a pipeline.")] = "zoo:diffusion",
    drafter: Annotated[str | None, typer.Option(help="For recipes that need one.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Of the sampler.")] = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder of the two pictures.")] = Path(),
) -> None:
    """Draw every prompt plainly and with every recipe."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    try:
        given = {} if steps is None else {"steps": steps}
        loaded = _loaded(model, drafter, recipe or RECIPES, given)
        columns = _columns(loaded, recipe or RECIPES)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    prompts = prompt or list(PROMPTS)
    asked = [loaded.formatter.request([text]) for text in prompts]
    for fast in columns.values():
        fast(**asked[0], seed=seed)  # warm-up
    drawn: dict[str, list[DrawnPipeline]] = {}
    with progress(False) as bar:
        for index, (name, fast) in enumerate(columns.items()):
            bar("recipes", index, len(columns))
            drawn[name] = [_draw(fast, one, seed) for one in asked]
    panels = {
        name: [Panel(one.picture, (one.words,)) for one in row] for name, row in drawn.items()
    }
    sheet(panels, prompts).save(out / "diffusion-pictures.png")
    written = ["diffusion-pictures.png"]
    chains = {name: row[0].rounds for name, row in drawn.items() if row[0].rounds}
    if chains:
        _plots(chains).save(out / "diffusion-rounds.png")
        written.append("diffusion-rounds.png")
    _table(drawn)
    console.print(f"written to {out.resolve()}: {', '.join(written)}")


@dataclass(frozen=True)
class DrawnPipeline:
    """A picture, and what it took."""

    picture: Any
    words: str
    calls: int
    rows: int | None  # of the network; not counted by forecasts
    seconds: float
    rounds: list[tuple[int, int]]  # network calls and steps taken of each; none of forecasts


def _loaded(
    model: str, drafter: str | None, chosen: Sequence[str], given: dict[str, Any]
) -> Loaded:
    """The pipeline and its draft pipeline; without one, those recipes that need none."""
    try:
        return opened(model, "diffusion", drafter, chosen, **given)
    except ValueError as error:
        free = [name for name in chosen if not recipes.get(name).takes_drafter]
        if not free or len(free) == len(chosen):
            raise
        found = opened(model, "diffusion", None, free, **given)
        needy = [name for name in chosen if name not in free]
        console.print(f"without {', '.join(needy)}: {error}", style="yellow")
        return found


def _columns(loaded: Loaded, asked: Sequence[str]) -> dict[str, Any]:
    """Recipes of chains behind plain sampling, those that forecast behind the pipeline itself."""
    chosen, pipe = loaded.chosen.recipes, loaded.model
    of_chains = [name for name in asked if isinstance(recipes.get(name).execution, Window)]
    chains = [name for name in chosen if name in of_chains]
    forecasts = [name for name in chosen if name not in chains]
    columns = {}
    if of_chains:
        columns["plain"] = mmspec.accelerate(pipe, "paradigms", window=1)  # drafts nothing
        columns |= {name: loaded.fast(name) for name in chains}
    if forecasts:
        columns["pipeline"] = mmspec.accelerate(pipe, "taylorseer", lite=True, interval=1)
        columns |= {name: loaded.fast(name) for name in forecasts}
    return columns


def _draw(fast: Any, asked: dict[str, Any], seed: int) -> DrawnPipeline:
    rounds: list[tuple[int, int]] = []

    def note(one: Round) -> None:
        rounds.append((one.calls, len(one.tokens[0])))

    is_chain = isinstance(fast.recipe.execution, Window)
    watched = {"on_round": note} if is_chain else {}
    begun = perf_counter()
    picture = fast(**asked, seed=seed, output_type="pil", **watched).images[0]
    seconds, stats = perf_counter() - begun, fast.last_stats
    if is_chain:
        words = f"{stats.target_calls} calls, {stats.network_rows} rows"
        return DrawnPipeline(
            picture, words, stats.target_calls, stats.network_rows, seconds, rounds
        )
    words = f"{stats.target_calls} full, {stats.num_accepted_draft_tokens} forecast"
    return DrawnPipeline(picture, words, stats.target_calls, None, seconds, rounds)


def _plots(chains: dict[str, list[tuple[int, int]]]) -> Image.Image:
    """Of the first prompt: steps taken per round along the chain, and in all over network calls."""
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
    """Lines over one pair of axes, both from 0, with their names."""
    most = [max(point[axis] for line in lines.values() for point in line) for axis in (0, 1)]

    wide, high = WIDE - EDGE - NAMES, HIGH - 2 * EDGE

    def at(x: float, y: float) -> tuple[float, float]:
        return EDGE + wide * x / most[0], top + EDGE + high * (1 - y / most[1])

    pen.line([at(0, most[1]), at(0, 0), at(most[0], 0)], fill="black")
    pen.text((EDGE - 10, at(0, 0)[1] + 2), "0", fill="black")
    pen.text((EDGE + wide - 100, at(0, 0)[1] + 2), f"{most[0]:g} {across}", fill="black")
    pen.text((EDGE, at(0, most[1])[1] - LINE - 4), f"{most[1]:g} {up}", fill="black")
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        shifted = [(x, y - index) for x, y in (at(*point) for point in points)]
        pen.line(shifted, fill=colour, width=2)  # lines on top of each other stay visible
        pen.text((EDGE + wide + MARGIN, top + EDGE + LINE * index), name, fill=colour)


def _table(drawn: dict[str, list[DrawnPipeline]]) -> None:
    table = Table("per picture", "calls", "rows", "seconds", "claims", box=None)
    for name, row in drawn.items():
        numbers = [mean(one.calls for one in row), mean(one.rows or 0 for one in row)]
        seconds = mean(one.seconds for one in row)
        claim = "exact" if name in OWN or recipes.get(name).exact else _lost(drawn, name)
        calls, rows = (f"{number:.1f}" if number else "" for number in numbers)
        table.add_row(name, calls, rows, f"{seconds:.2f}", claim)
    console.print(table)


def _lost(drawn: dict[str, list[DrawnPipeline]], name: str) -> str:
    """How far the pictures of a lossy recipe are from those of the same noise."""
    own = "plain" if drawn[name][0].rounds else "pipeline"
    pair = (np.stack([_numbers(one.picture) for one in drawn[key]]) for key in (own, name))
    psnr = apart(*pair).psnr
    return "lossy, none lost" if psnr is None else f"lossy, PSNR {psnr:.1f} dB"


def _numbers(picture: Image.Image) -> np.ndarray:  # (H, W, 3) in [0, 1]
    return np.asarray(picture.convert("RGB")) / 255


if __name__ == "__main__":
    typer.run(main)
