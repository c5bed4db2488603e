"""`mmspec generate --modality image`: a picture of codes, and what speculation made of it."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from mmspec.cli import inputs as given
from mmspec.cli.drawing import Studio
from mmspec.cli.output import console, emit, pairs, progress, times
from mmspec.cli.sheet import tiled


def draw(
    studio: Studio,
    recipe: str,
    prompt: str,
    grid: tuple[int, int],
    out: Path,
    steps_map: Path | None,
    settings: dict[str, Any],
    parts: dict[str, Any],
    seed: int,
    repeats: int,
    json: bool,
) -> None:
    """Draw a picture, or a sheet of `grid` rows and columns of them as one batch, into `out`.

    With `repeats` above 0 plain decoding is measured too.
    """
    given.check_picture(prompt, out, *([] if steps_map is None else [steps_map]))
    asked, fast = studio.asked([prompt] * prod(grid)), studio.fast(recipe, **parts)
    drawn = fast.generate_images(**asked, **settings, seed=seed)
    rounds = drawn.rounds.tolist()
    tiled(drawn.images, grid[1]).save(out)
    if steps_map is not None:
        from mmspec.cli.steps_map import steps_map as mapped

        tiled([mapped(one) for one in rounds], grid[1]).save(steps_map)
    document: dict[str, Any] = {
        "out": str(out),
        "steps_map": None if steps_map is None else str(steps_map),
        "model": studio.name,
        "drafter": studio.drafter(recipe)[0],
        "recipe": recipe,
        "exact": fast.recipe.exact,
        "seed": seed,
        "rounds": rounds,
        "codes": drawn.ids.tolist(),
    }
    if repeats:
        document |= _compared(studio, recipe, fast, asked, settings, seed, repeats, json)
    document["stats"] = drawn.stats.to_dict()
    if json:
        emit(document)
        return
    shown = f"{out}: {prompt}" if steps_map is None else f"{out}, {steps_map}: {prompt}"
    console().print(shown, markup=False)
    console().print()
    pairs(rows(document, drawn.stats))


def _compared(
    studio: Studio,
    recipe: str,
    fast: Any,
    asked: dict[str, Any],
    settings: dict[str, Any],
    seed: int,
    repeats: int,
    json: bool,
) -> dict[str, Any]:
    """Plain decoding, the model's own loop and the recipe in turns, in this process."""
    from mmspec.bench.gallery import Gallery
    from mmspec.bench.images import compare_images

    with progress(json) as report:
        found = compare_images(
            {recipe: fast},
            Gallery([asked]),
            settings,
            model=studio.name,
            repeats=repeats,
            seed=seed,
            efficiency=False,
            progress=report,
        )
    plain, mine = found.rows[0], found.rows[-1]
    return {
        "calls_plain": plain.calls,
        "calls": mine.calls,
        "fewer_calls": mine.fewer_calls,
        "speedup_over_plain": mine.speedup_over_plain,
        "speedup_over_generate": mine.speedup_over_generate,
        "spread": mine.spread,
        "seconds_per_request": {row.recipe: row.seconds_per_request for row in found.rows},
        "log_likelihood": {row.recipe: row.log_likelihood for row in found.rows},
        "generate": found.generate,
    }


def rows(document: dict[str, Any], stats: Any) -> list[tuple[str, Any]]:
    """What is said of a drawn picture."""
    found: list[tuple[str, Any]] = []
    if "calls" in document:
        seconds = document["seconds_per_request"].items()
        found += [
            ("target calls: plain, method", f"{document['calls_plain']:.0f}, {stats.target_calls}"),
            ("target calls saved", times(document["fewer_calls"], None) + " fewer"),
            ("speed-up over plain decoding", _over(document, "plain")),
            ("speed-up over generate()", _over(document, "generate")),
            ("seconds", ", ".join(f"{name} {value:.3g}" for name, value in seconds)),
        ]
    exact = "exact" if document["exact"] else "lossy"
    found += [
        ("mean acceptance length", stats.mean_acceptance_length),
        ("tokens per target call", stats.tokens_per_target_call),
        ("codes, target calls", f"{stats.num_new_tokens}, {stats.target_calls}"),
        ("recipe", f"{document['recipe']} ({exact})"),
        ("model, drafter", [document["model"], document["drafter"]]),
    ]
    if stats.over_accepted_mass is not None:
        found.append(("over-accepted mass per code", stats.over_accepted_mass))
    if stats.fallback:
        found.append(("fell back to plain decoding", stats.fallback))
    return found


def _over(document: dict[str, Any], name: str) -> str | None:
    value = document[f"speedup_over_{name}"]
    return None if value is None else times(value, document["spread"][name])
