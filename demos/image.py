"""Speculative drawing with picture tokens, seen side by side.

    python demos/image.py                                    # the bundled Janus, one row per prompt
    python demos/image.py --prompt "a red square" --recipe sjd --recipe lantern
    python demos/image.py --model DIR --drafter DIR          # a model of your own

Writes a sheet of pictures, all with the same seed, and a map of the round that each patch of the
first one came in. Below a picture: calls of the target, how many of the facts of its prompt a
parser finds in it (prompts of the zoo), and how likely the target finds its codes. Coupled recipes
draw plain's very picture; other exact ones another of the same distribution; lossy ones say so.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from mmspec.cli.loaded import opened
from mmspec.cli.output import progress
from mmspec.modalities.common.sheets import Panel, sheet
from mmspec.modalities.image.likelihood import log_likelihood
from mmspec.modalities.image.steps_map import steps_map
from mmspec.zoo.prompts import prompts as held_out
from mmspec.zoo.reading import score_picture
from mmspec.zoo.scene import Scene

console = Console(highlight=False)
RECIPES = ("coupled", "sjd", "mc-sjd", "sjd-pac", "lantern", "gsd", "mulo-sd")


def main(
    model: Annotated[str, typer.Option(help="zoo:image, or a folder.")] = "zoo:image",
    drafter: Annotated[str | None, typer.Option(help="Draft model; the zoo has its own.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="How many prompts of the zoo.")] = 4,
    guidance: Annotated[float | None, typer.Option(help="Its scale.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder of the two pictures.")] = Path(),
) -> None:
    """Draw every prompt plainly and with every recipe."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    chosen = recipe or list(RECIPES)
    loaded = opened(
        model, "image", drafter, chosen, seed, guidance=guidance, temperature=temperature
    )
    ways = {name: loaded.fast(name) for name in ("plain", *chosen)}
    asked: list[tuple[str, Scene | None]] = [(text, None) for text in prompt or ()]
    if not asked:
        asked = [(one.text, one.scene) for one in held_out(pictures, seed=seed)]
    for fast in ways.values():
        loaded.ask(fast, loaded.formatter.request([asked[0][0]]), seed)  # warm-up
    drawn: dict[str, list[DrawnCodes]] = {name: [] for name in ways}
    with progress(False) as bar:
        for index, (text, scene) in enumerate(asked):
            request = loaded.formatter.request([text])
            for place, (name, fast) in enumerate(ways.items()):
                bar("pictures", index * len(ways) + place, len(asked) * len(ways))
                drawn[name].append(_draw(ways["plain"], fast, request, seed, scene))
    panels = {name: [one.panel() for one in column] for name, column in drawn.items()}
    sheet(panels, [text for text, _ in asked]).save(out / "image-pictures.png")
    steps_map(drawn[chosen[-1]][0].made.rounds[0].tolist()).save(out / "image-rounds.png")
    _table(drawn, ways)
    console.print(f"image-pictures.png and image-rounds.png are in {out.resolve()}")


class DrawnCodes:
    """A picture, what it took, and how good it is."""

    def __init__(self, made: Any, seconds: float, likelihood: float, scene: Scene | None) -> None:
        self.made, self.seconds, self.likelihood = made, seconds, likelihood
        self.calls = int(made.stats.target_calls)
        self.facts = None if scene is None else score_picture(scene, made.images[0])

    def panel(self) -> Panel:
        known = "" if self.facts is None else "{} of {} facts, ".format(*self.facts)
        words = (f"{self.calls} target calls", f"{known}log p {self.likelihood:.2f}")
        return Panel(self.made.images[0], words)


def _draw(
    plain: Any, fast: Any, request: dict[str, Any], seed: int, scene: Scene | None
) -> DrawnCodes:
    begun = perf_counter()
    made = fast.generate_images(**request, seed=seed)
    seconds = perf_counter() - begun
    likely = log_likelihood(plain, plain.session.drawing(**request), made.sequences)
    return DrawnCodes(made, seconds, float(likely), scene)


def _table(drawn: dict[str, list[DrawnCodes]], ways: dict[str, Any]) -> None:
    table = Table("recipe", "target calls", "seconds", "facts right", "log p", "claims", box=None)
    for name, column in drawn.items():
        facts = [one.facts for one in column if one.facts is not None]
        right, asked = (sum(part) for part in zip(*facts, strict=True)) if facts else (0, 0)
        calls, seconds, likely = (
            sum(getattr(one, field) for one in column) / len(column)
            for field in ("calls", "seconds", "likelihood")
        )
        shown = f"{right} of {asked}" if facts else "-"
        claim = "exact" if ways[name].recipe.exact else "lossy"
        table.add_row(name, f"{calls:.1f}", f"{seconds:.2f}", shown, f"{likely:.2f}", claim)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
