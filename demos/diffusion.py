"""Speculative sampling of a diffusion pipeline, seen side by side.

    python demos/diffusion.py                        # the bundled pipeline, one row per prompt
    python demos/diffusion.py --model DIR --prompt "a red square" --recipe asd --recipe paradigms

Writes a sheet of pictures with the same seeds, and a plot of the steps taken over network calls.
Columns behind "plain" have its noise: exact recipes leave its picture where a draft is rejected,
for another one of the same law. Columns behind "pipeline" have the noise of its own loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

import mmspec
from mmspec import recipes
from mmspec.cli import painting
from mmspec.cli.inputs import quiet
from mmspec.drafters.window import Window

console = Console(highlight=False)
RECIPES = ("asd", "accelerated-diffusion-carried", "block-diffusion", "paradigms", "taylorseer")
PROMPTS = (
    "a large red circle in the center",
    "a small blue square at the top and a large green star at the bottom",
    "a large yellow triangle on the left",
)
OWN = ("plain", "pipeline")
SIDE, MARGIN, LINE = 144, 8, 13  # pixels
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8e5ea2", "#e9a23b", "#444444")


def main(
    model: Annotated[str, typer.Option(help="zoo:diffusion, or a pipeline.")] = painting.MODEL,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Of the sampler.")] = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder of the two pictures.")] = Path(),
) -> None:
    """Draw every prompt plainly and with every recipe."""
    quiet()
    torch.set_num_threads(1)  # models this small gain nothing from more
    prompts, chosen = prompt or list(PROMPTS), recipe or list(RECIPES)
    painter = painting.load(model, None, None, steps)
    columns = _columns(painter.pipe, chosen)
    asked = [painter.asked([text]) for text in prompts]
    next(iter(columns.values()))(**asked[0], seed=seed)  # warm-up
    drawn = {name: [_draw(fast, one, seed) for one in asked] for name, fast in columns.items()}
    _sheet(drawn, prompts).save(out / "diffusion-pictures.png")
    chains = {name: row for name, row in drawn.items() if row[0].moves}
    if chains:
        _plot(chains).save(out / "diffusion-rounds.png")
    _table(drawn)
    console.print(f"diffusion-pictures.png and diffusion-rounds.png are in {out.resolve()}")


class Drawn:
    """A picture, and what it took."""

    def __init__(self, picture: Any, stats: Any, seconds: float, is_chain: bool) -> None:
        self.picture, self.seconds, self.moves = picture, seconds, list[int]()
        if is_chain:
            self.words = f"{stats.target_calls} calls, {stats.network_rows} rows"
            self.calls = int(stats.target_calls)
            idle = stats.speculation_off_steps
            self.moves = [1 + kept for kept in stats.per_step_accepted] + [1] * idle
        else:
            self.words = f"{stats.full} full, {stats.forecast} forecast"
            self.calls = int(stats.full)


def _columns(pipe: Any, chosen: Sequence[str]) -> dict[str, Any]:
    """Recipes of chains behind plain sampling, those that forecast behind the pipeline itself."""
    chains = [name for name in chosen if isinstance(recipes.get(name).execution, Window)]
    forecasts = [name for name in chosen if name not in chains]
    columns = {}
    if chains:
        columns["plain"] = mmspec.accelerate(pipe, "paradigms", window=1)  # drafts nothing
        columns |= {name: mmspec.accelerate(pipe, name) for name in chains}
    if forecasts:
        columns["pipeline"] = mmspec.accelerate(pipe, "taylorseer", lite=True, interval=1)
        columns |= {name: mmspec.accelerate(pipe, name) for name in forecasts}
    return columns


def _draw(fast: Any, asked: dict[str, Any], seed: int) -> Drawn:
    begun = perf_counter()
    picture = fast(**asked, seed=seed, output_type="pil").images[0]
    seconds = perf_counter() - begun
    return Drawn(picture, fast.last_stats, seconds, isinstance(fast.recipe.execution, Window))


def _sheet(drawn: dict[str, list[Drawn]], prompts: Sequence[str]) -> Image.Image:
    """A row per prompt, a column per recipe, its cost below."""
    wide, high = SIDE + MARGIN, SIDE + 2 * LINE + MARGIN
    size = (MARGIN + wide * len(drawn), LINE + MARGIN + (high + LINE) * len(prompts))
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for column, (name, row) in enumerate(drawn.items()):
        left = MARGIN + column * wide
        pen.text((left, 2), name[:24], fill="black")
        for index, one in enumerate(row):
            top = LINE + MARGIN + index * (high + LINE)
            if column == 0:
                pen.text((left, top), prompts[index], fill="black")
            picture = one.picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)
            sheet.paste(picture, (left, top + LINE))
            pen.text((left, top + LINE + SIDE + 1), one.words, fill="#555555")
    return sheet


def _plot(drawn: dict[str, list[Drawn]]) -> Image.Image:
    """Steps taken over network calls, of the first prompt: the steeper, the better.

    A round is one call, or two where the network is asked again about the state a draft begins at;
    calls are shared out evenly over the rounds, and rounds without a draft stand at the end.
    """
    wide, high, edge = 560, 320, 40
    plot = Image.new("RGB", (wide, high), "white")
    pen = ImageDraw.Draw(plot)
    calls = max(row[0].calls for row in drawn.values())
    steps = max(sum(row[0].moves) for row in drawn.values())

    def at(call: float, taken: int) -> tuple[float, float]:
        x = edge + (wide - 2 * edge) * call / calls
        return x, high - edge - (high - 2 * edge) * taken / steps

    pen.line([at(0, steps), at(0, 0), at(calls, 0)], fill="black")
    pen.text((edge, high - edge + 4), "0", fill="black")
    pen.text((wide - edge - 90, high - edge + 4), f"{calls} network calls", fill="black")
    pen.text((4, edge - 16), f"{steps} steps taken", fill="black")
    for index, (name, row) in enumerate(drawn.items()):
        taken, points = 0, [at(0, 0)]
        for turn, move in enumerate(row[0].moves):
            taken += move
            x, y = at((turn + 1) * row[0].calls / len(row[0].moves), taken)
            points.append((x, y - index))  # lines on top of each other stay visible
        colour = COLOURS[index % len(COLOURS)]
        pen.line(points, fill=colour, width=2)
        pen.text((edge + 12, edge + LINE * index), name, fill=colour)
    return plot


def _table(drawn: dict[str, list[Drawn]]) -> None:
    table = Table("recipe", "network calls", "cost of the first", "seconds", "claims", box=None)
    for name, row in drawn.items():
        calls = sum(one.calls for one in row) / len(row)
        seconds = sum(one.seconds for one in row) / len(row)
        claim = "exact" if name in OWN or recipes.get(name).exact else "lossy"
        table.add_row(name, f"{calls:.1f}", row[0].words, f"{seconds:.2f}", claim)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
