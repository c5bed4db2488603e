"""Generate images from image tokens plainly and speculatively, and compare them.

    python demos/image.py                                    # the bundled Janus, one row per prompt
    python demos/image.py --prompt "a red square" --recipe sjd --recipe lantern
    python demos/image.py --model DIR --drafter DIR          # a model of your own

Writes a sheet of images, all with the same seed, and a map of the round of each patch of the first
one. Below an image: target calls, how many facts of its prompt a parser finds in it (bundled
prompts only), and the mean log-likelihood of its codes under the target. Coupled recipes generate
the image of plain decoding; other exact ones another image of the same distribution.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from mmspec.cli.models import load_models
from mmspec.cli.output import show_progress
from mmspec.modalities.common.sheets import Panel, sheet
from mmspec.modalities.image.measures import log_likelihood
from mmspec.modalities.image.round_maps import render_steps_map
from mmspec.zoo.prompts import prompts as held_out
from mmspec.zoo.scene import Scene
from mmspec.zoo.scene_parser import score_picture

console = Console(highlight=False)
CLAIMS = (
    "exact: the distribution of plain decoding, the model's own mistakes included, so the facts of "
    "a few images differ by chance; lossy: another distribution"
)
RECIPES = ("coupled", "sjd", "mc-sjd", "sjd-pac", "lantern", "gsd", "mulo-sd")


def main(
    model: Annotated[str, typer.Option(help="zoo:image, or a folder.")] = "zoo:image",
    drafter: Annotated[
        str | None, typer.Option(help="Draft model; default: the bundled one.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="Number of bundled prompts.")] = 4,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder for the two images.")] = Path(),
) -> None:
    """Generate an image of every prompt plainly and with every recipe."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    chosen = recipe or list(RECIPES)
    loaded = load_models(
        model, "image", drafter, chosen, seed, guidance=guidance, temperature=temperature
    )
    ways = {name: loaded.accelerate(name) for name in ("plain", *chosen)}
    examples: list[tuple[str, Scene | None]] = [(text, None) for text in prompt or ()]
    if not examples:
        examples = [(one.text, one.scene) for one in held_out(pictures, seed=seed)]
    for fast in ways.values():
        loaded.call(fast, loaded.formatter.request([examples[0][0]]), seed)  # warm-up
    results: dict[str, list[CodesResult]] = {name: [] for name in ways}
    with show_progress(False) as bar:
        for index, (text, scene) in enumerate(examples):
            request = loaded.formatter.request([text])
            for place, (name, fast) in enumerate(ways.items()):
                bar("pictures", index * len(ways) + place, len(examples) * len(ways))
                results[name].append(_generate_image(ways["plain"], fast, request, seed, scene))
    panels = {name: [one.panel() for one in column] for name, column in results.items()}
    sheet(panels, [text for text, _ in examples]).save(out / "image-pictures.png")
    rounds = results[chosen[-1]][0].made.rounds[0].tolist()
    render_steps_map(rounds, f"{chosen[-1]}, first prompt").save(out / "image-rounds.png")
    _table(results, ways)
    console.print(f"image-pictures.png and image-rounds.png are in {out.resolve()}")


class CodesResult:
    """An image, its cost and its scores."""

    def __init__(self, made: Any, seconds: float, likelihood: float, scene: Scene | None) -> None:
        self.made, self.seconds, self.likelihood = made, seconds, likelihood
        self.calls = int(made.stats.target_calls)
        self.facts = None if scene is None else score_picture(scene, made.images[0])

    def panel(self) -> Panel:
        facts = "" if self.facts is None else "{} of {} facts, ".format(*self.facts)
        lines = (f"{self.calls} target calls", f"{facts}log p {self.likelihood:.2f}")
        return Panel(self.made.images[0], lines)


def _generate_image(
    plain: Any, fast: Any, request: dict[str, Any], seed: int, scene: Scene | None
) -> CodesResult:
    start = perf_counter()
    made = fast.generate_images(**request, seed=seed)
    seconds = perf_counter() - start
    likely = log_likelihood(plain, plain.session.prepare_request(**request), made.sequences)
    return CodesResult(made, seconds, float(likely), scene)


def _table(results: dict[str, list[CodesResult]], ways: dict[str, Any]) -> None:
    table = Table("recipe", "target calls", "seconds", "facts right", "log p", "claims", box=None)
    for name, column in results.items():
        facts = [one.facts for one in column if one.facts is not None]
        right, total = (sum(part) for part in zip(*facts, strict=True)) if facts else (0, 0)
        calls, seconds, likely = (
            sum(getattr(one, field) for one in column) / len(column)
            for field in ("calls", "seconds", "likelihood")
        )
        score = f"{right} of {total}" if facts else "-"
        claim = "exact" if ways[name].recipe.exact else "lossy"
        table.add_row(name, f"{calls:.1f}", f"{seconds:.2f}", score, f"{likely:.2f}", claim)
    console.print(table)
    console.print(CLAIMS)


if __name__ == "__main__":
    typer.run(main)
