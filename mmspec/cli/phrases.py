"""What `mmspec train phrases` does: frequent runs of codes out of a model's own pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec.cli.choosing import Chosen, check_writable, choose
from mmspec.cli.loaded import Loaded, load
from mmspec.cli.options import Choice
from mmspec.cli.output import console, emit, pairs, progress
from mmspec.registry import ZOO
from mmspec.training.phrases import learn_phrases
from mmspec.zoo import path
from mmspec.zoo.prompts import prompts as scenes

FILE = "phrases.safetensors"


def run(
    choice: Choice,
    out: Path | None,
    pictures: int,
    prompt: list[str] | None,
    merges: int,
    longest: int,
    least: int,
    batch: int,
) -> None:
    """Draw pictures and save the phrases in them."""
    chosen = choose(choice)
    file, texts = out or _beside(chosen), _texts(chosen, prompt, pictures, choice.seed)
    check_writable("--out", file)
    loaded = load(choice, chosen)
    fast = loaded.fast(chosen.recipe)
    asked = _requests(loaded, texts, batch)
    with progress(choice.json) as report:
        learnt = learn_phrases(fast, asked, {}, merges, longest, least, choice.seed, report)
    learnt.phrases.save(file)
    document: dict[str, Any] = {
        "out": str(file),
        "model": chosen.model,
        "recipe": chosen.recipe,
        "pictures": learnt.pictures,
        "rows": learnt.rows,
        "codes": learnt.codes,
        "phrases": len(learnt.phrases),
        "phrases_by_length": learnt.lengths(),
    }
    if choice.json:
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
            ("model, recipe", [chosen.model, chosen.recipe]),
        ]
    )


def _beside(chosen: Chosen) -> Path:
    """In the model's folder; in this one for a model of the hub."""
    name = chosen.model
    folder = path(name) if name.startswith(ZOO) else Path(name)
    return folder / FILE if folder.is_dir() else Path(FILE)


def _texts(chosen: Chosen, prompt: Sequence[str] | None, count: int, seed: int) -> list[str]:
    """What was typed, in turns, or the zoo's training prompts. Raises ValueError without either."""
    if prompt:
        return [prompt[index % len(prompt)] for index in range(count)]
    if not chosen.model.startswith(ZOO):
        raise ValueError(f"{chosen.model} has no prompts of its own; give --prompt, once or more")
    return [one.text for one in scenes(count, "train", seed)]


def _requests(loaded: Loaded, texts: Sequence[str], batch: int) -> list[dict[str, Any]]:
    return [loaded.formatter.request(texts[at : at + batch]) for at in range(0, len(texts), batch)]
