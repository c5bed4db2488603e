"""`mmspec train`: what recipes learn from a model that is as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli import drawing
from mmspec.cli import inputs as given
from mmspec.cli.drawing import Studio
from mmspec.cli.generate import Codes
from mmspec.cli.output import Json, console, emit, pairs, progress

app = typer.Typer(help="Learn from what a model says or draws.", no_args_is_help=True)
FILE = "phrases.safetensors"


@app.callback()
def train() -> None:
    """Learn from what a model says or draws."""


@app.command()
def phrases(
    model: Annotated[str, typer.Option(help="A model that draws with tokens.")] = drawing.MODEL,
    out: Annotated[
        Path | None, typer.Option(help=f"File to write; {FILE} beside the model by default.")
    ] = None,
    pictures: Annotated[int, typer.Option(min=1, help="How many to draw.")] = 256,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to draw, in turns; the zoo has its own.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="Draw with this one; it must be exact.")] = "plain",
    drafter: Annotated[str | None, typer.Option(help="Draft model, if the recipe has one.")] = None,
    merges: Annotated[int, typer.Option(min=0, help="Phrases at most.")] = 1000,
    longest: Annotated[int, typer.Option(min=2, help="Codes of a phrase at most.")] = 4,
    least: Annotated[int, typer.Option(min=1, help="How often a pair must occur.")] = 2,
    guidance: Annotated[float | None, typer.Option(help="The published scale if not said.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    codes: Codes = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures drawn at once.")] = 16,
    seed: int = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Processor threads to use.")] = None,
    json: Json = False,
) -> None:
    """Draw pictures and collect frequent runs of codes, for recipe sjd-pv."""
    from mmspec.training.phrases import learn_phrases

    given.quiet()
    given.set_threads(threads, model)
    file = beside(model) if out is None else out
    given.check_folder(file)
    if file.is_dir():
        raise ValueError(f"{file} is a folder; give --out a file in it, such as {file / FILE}")
    studio = drawing.load(model, drafter, [recipe])
    how = drawing.settings(model, guidance, temperature, codes)
    asked = requests(studio, prompt, pictures, batch, seed)
    with progress(json) as report:
        learnt = learn_phrases(
            studio.fast(recipe), asked, how, merges, longest, least, seed, report
        )
    learnt.phrases.save(file)
    document: dict[str, Any] = {
        "out": str(file),
        "model": model,
        "recipe": recipe,
        "pictures": learnt.pictures,
        "rows": learnt.rows,
        "codes": learnt.codes,
        "phrases": len(learnt.phrases),
        "phrases_by_length": learnt.lengths(),
        "settings": how,
    }
    if json:
        emit(document)
        return
    console().print(f'{file}: for accelerate(model, "sjd-pv", phrases=...)', markup=False)
    console().print()
    by_length = (f"{count} of {length}" for length, count in learnt.lengths().items())
    pairs(
        [
            ("phrases", len(learnt.phrases)),
            ("by length", ", ".join(by_length) or None),
            ("pictures, rows, codes", [learnt.pictures, learnt.rows, learnt.codes]),
            ("model, recipe", [model, recipe]),
        ]
    )


def beside(model: str) -> Path:
    """In the model's folder; in this one for a model of the hub."""
    name = given.folder(drawing.MODEL if model == given.MODEL else model)
    return Path(name) / FILE if Path(name).is_dir() else Path(FILE)


def requests(
    studio: Studio, prompt: Sequence[str] | None, pictures: int, batch: int, seed: int
) -> list[dict[str, Any]]:
    """Batches of what was typed, or of the zoo's training prompts.

    Raises ValueError where there is neither.
    """
    if prompt:
        texts = [prompt[index % len(prompt)] for index in range(pictures)]
    elif studio.is_zoo:
        from mmspec.zoo.prompts import prompts

        texts = [one.text for one in prompts(pictures, "train", seed)]
    else:
        raise ValueError(f"{studio.name} has no prompts of its own; give --prompt, once or more")
    return [studio.asked(texts[at : at + batch]) for at in range(0, pictures, batch)]
