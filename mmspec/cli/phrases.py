"""`mmspec train phrases`: collect frequent runs of codes in images of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec.cli.models import LoadedModels, Selected, check_writable, load, select
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import console, print_json, print_pairs, show_progress
from mmspec.registry import ZOO
from mmspec.training.phrases import learn_phrases
from mmspec.zoo import path
from mmspec.zoo.prompts import prompts as scenes

FILE = "phrases.safetensors"


def run(
    options: ModelOptions,
    out: Path | None,
    pictures: int,
    prompt: list[str] | None,
    merges: int,
    longest: int,
    least: int,
    batch: int,
) -> None:
    """Generate images and save the phrases in them."""
    selected = select(options)
    file, texts = out or _default_file(selected), _prompts(selected, prompt, pictures, options.seed)
    check_writable("--out", file)
    loaded = load(options, selected)
    fast = loaded.accelerate(selected.recipe)
    requests = _requests(loaded, texts, batch)
    with show_progress(options.json) as report:
        found = learn_phrases(fast, requests, {}, merges, longest, least, options.seed, report)
    found.phrases.save(file)
    document: dict[str, Any] = {
        "out": str(file),
        "model": selected.model,
        "recipe": selected.recipe,
        "pictures": found.pictures,
        "rows": found.rows,
        "codes": found.codes,
        "phrases": len(found.phrases),
        "phrases_by_length": found.lengths(),
    }
    if options.json:
        print_json(document)
        return
    console().print(f'{file}: for accelerate(model, "sjd-pv", phrases=...)', markup=False)
    console().print()
    by_length = (f"{count} of {length}" for length, count in found.lengths().items())
    print_pairs(
        [
            ("phrases", len(found.phrases)),
            ("by length", ", ".join(by_length) or None),
            ("pictures, rows, codes", [found.pictures, found.rows, found.codes]),
            ("model, recipe", [selected.model, selected.recipe]),
        ]
    )


def _default_file(selected: Selected) -> Path:
    """The default file: in the model's folder; here for a model of the hub."""
    name = selected.model
    folder = path(name) if name.startswith(ZOO) else Path(name)
    return folder / FILE if folder.is_dir() else Path(FILE)


def _prompts(selected: Selected, prompt: Sequence[str] | None, count: int, seed: int) -> list[str]:
    """Given prompts, in turns, or the bundled ones. Raises ValueError without either."""
    if prompt:
        return [prompt[index % len(prompt)] for index in range(count)]
    if not selected.model.startswith(ZOO):
        raise ValueError(f"{selected.model} has no prompts of its own; give --prompt, once or more")
    return [one.text for one in scenes(count, "train", seed)]


def _requests(loaded: LoadedModels, texts: Sequence[str], batch: int) -> list[dict[str, Any]]:
    return [loaded.formatter.request(texts[at : at + batch]) for at in range(0, len(texts), batch)]
