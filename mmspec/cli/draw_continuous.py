"""`mmspec generate --modality image` by a model with continuous tokens."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from mmspec.cli import inputs as given
from mmspec.cli.easel import Easel
from mmspec.cli.output import console, emit, pairs, percent, progress, times
from mmspec.cli.sheet import tiled


def draw_continuous(
    easel: Easel,
    recipe: str,
    prompt: str,
    grid: tuple[int, int],
    out: Path,
    seed: int,
    repeats: int,
    json: bool,
) -> None:
    """Draw a picture of a class, or a sheet of `grid` rows and columns of them, into `out`.

    With `repeats` above 0 plain sampling is measured too.
    """
    given.check_picture(prompt, out)
    asked, fast = easel.asked([prompt] * prod(grid)), easel.fast(recipe)
    drawn = fast.generate_images(**asked, **easel.settings, seed=seed, vae=easel.vae)
    tiled(drawn.images, grid[1]).save(out)
    document: dict[str, Any] = {
        "out": str(out),
        "model": easel.names[0],
        "drafter": easel.names[1],
        "recipe": recipe,
        "exact": fast.recipe.exact,
        "seed": seed,
        "settings": easel.settings,
    }
    if repeats:
        document |= _compared(easel, recipe, fast, asked, seed, repeats, json)
    document["stats"] = drawn.stats.to_dict()
    if json:
        emit(document)
        return
    console().print(f"{out}: {prompt}", markup=False)
    console().print()
    pairs(rows(document, drawn.stats))


def _compared(
    easel: Easel,
    recipe: str,
    fast: Any,
    asked: dict[str, Any],
    seed: int,
    repeats: int,
    json: bool,
) -> dict[str, Any]:
    """Plain sampling, the target in wider steps and the recipe in turns, in this process."""
    from mmspec.bench.continuous import compare_continuous
    from mmspec.bench.gallery import Gallery

    with progress(json) as report:
        found = compare_continuous(
            {recipe: fast},
            Gallery([asked]),
            easel.settings,
            easel.vae,
            repeats=repeats,
            seed=seed,
            progress=report,
        )
    plain, mine = found.rows[0], found.rows[-1]
    return {
        "calls_plain": plain.calls,
        "calls": mine.calls,
        "fewer_calls": plain.calls / mine.calls,
        "speedup_over_plain": mine.speedup_over_plain,
        "spread": mine.spread,
        "seconds_per_request": {row.recipe: row.seconds_per_request for row in found.rows},
    }


def rows(document: dict[str, Any], stats: Any) -> list[tuple[str, Any]]:
    """What is said of a drawn picture."""
    found: list[tuple[str, Any]] = []
    if "calls" in document:
        seconds = document["seconds_per_request"].items()
        found += [
            ("target calls: plain, method", f"{document['calls_plain']:.0f}, {stats.target_calls}"),
            ("target calls saved", times(document["fewer_calls"], None) + " fewer"),
            ("speed-up over plain", times(document["speedup_over_plain"], document["spread"])),
            ("seconds", ", ".join(f"{name} {value:.3g}" for name, value in seconds)),
        ]
    exact = "exact" if document["exact"] else "lossy"
    settings = ", ".join(f"{name} {value}" for name, value in document["settings"].items())
    return [
        *found,
        ("mean acceptance length", stats.mean_acceptance_length),
        ("acceptance rate of drafts", percent(stats.draft_acceptance_rate)),
        ("steps, target calls", f"{stats.num_new_tokens}, {stats.target_calls}"),
        ("recipe", f"{document['recipe']} ({exact})"),
        ("settings", settings),
        ("model, drafter", [document["model"], document["drafter"]]),
    ]
