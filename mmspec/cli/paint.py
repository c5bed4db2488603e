"""`mmspec generate --modality diffusion`: a picture, and what speculation made of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspec.cli import inputs as given
from mmspec.cli.bench_pictures import lost
from mmspec.cli.output import console, emit, pairs, percent, progress, times
from mmspec.cli.painting import Painter, accelerated


def paint(
    painter: Painter,
    prompt: str,
    out: Path,
    parts: Mapping[str, Any],
    seed: int,
    repeats: int,
    json: bool,
) -> None:
    """Draw one picture into `out`; with `repeats` above 0 plain drawing is measured too."""
    given.check_picture(prompt, out)
    asked = painter.asked([prompt])
    fast = accelerated(painter, parts)
    drawn = fast(**asked, seed=seed).images[0]
    drawn.save(out)
    document: dict[str, Any] = {
        "out": str(out),
        "model": painter.names[0],
        "drafter": painter.names[1],
        "recipe": painter.recipe,
        "exact": fast.recipe.exact,
        "seed": seed,
    }
    if repeats:
        document |= _compared(painter, asked, parts, seed, repeats, json)
    document["stats"] = fast.last_stats.to_dict()
    if json:
        emit(document)
        return
    console().print(f"{out}: {prompt}", markup=False)
    console().print()
    pairs(rows(document, document["stats"]))


def _compared(
    painter: Painter,
    asked: dict[str, Any],
    parts: Mapping[str, Any],
    seed: int,
    repeats: int,
    json: bool,
) -> dict[str, Any]:
    from mmspec.bench.latents import Drawing, compare_latents

    with progress(json) as report:
        found = compare_latents(
            painter.pipe,
            painter.recipe,
            Drawing([asked]),
            drafter=painter.drafter,
            names=painter.names,
            repeats=repeats,
            seed=seed,
            progress=report,
            **parts,
        )
    wanted = (
        *("steps", "calls_plain", "calls", "calls_saved", "rows_plain", "rows"),
        *("speedup_over_pipeline", "speedup_over_plain", "speedup_if_rows_were_free", "spread"),
        *("mean_acceptance_length", "draft_acceptance_rate", "relative_distance"),
        *("psnr", "ssim"),
        "seconds_per_request",
    )
    every = found.to_dict()
    return {name: every[name] for name in wanted}


def rows(document: dict[str, Any], stats: dict[str, Any]) -> list[tuple[str, Any]]:
    """What is said of a drawn picture."""
    found: list[tuple[str, Any]] = []
    if "calls" in document:
        seconds, over = document["seconds_per_request"].items(), "speedup_over_pipeline"
        found += [
            ("network calls", [f"plain {document['calls_plain']:.0f}", _counted(document)]),
            ("calls saved", percent(document["calls_saved"])),
            ("speed-up if rows were free", times(document["speedup_if_rows_were_free"])),
            ("speed-up over the pipeline, here", times(document[over], document["spread"][over])),
            ("seconds", ", ".join(f"{name} {value:.3g}" for name, value in seconds)),
        ]
        found += lost(document)
    if "target_calls" in stats:
        found += [
            ("acceptance rate of drafts", percent(stats["draft_acceptance_rate"])),
            ("mean acceptance length", stats["mean_acceptance_length"]),
            ("steps, network calls", f"{stats['num_new_tokens']}, {stats['target_calls']}"),
            ("network rows", stats["network_rows"]),
        ]
    else:
        found.append(("steps in full, forecast", f"{stats['full']}, {stats['forecast']}"))
    exact = "exact" if document["exact"] else "lossy"
    found += [
        ("recipe", f"{document['recipe']} ({exact})"),
        ("model, drafter", [document["model"], document["drafter"]]),
    ]
    return found


def _counted(document: dict[str, Any]) -> str:
    return f"{document['recipe']} {document['calls']:.0f}"
