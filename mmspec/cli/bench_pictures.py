"""`mmspec bench` for pipelines that draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmspec.cli.output import console, emit, pairs, percent, progress, table
from mmspec.cli.painting import Painter

if TYPE_CHECKING:
    from mmspec.bench.latents import Drawing, LatentComparison


def bench_pictures(
    painter: Painter,
    prompt: list[str] | None,
    prompts: int,
    batch: int,
    window: int | None,
    repeats: int,
    seed: int,
    json: bool,
) -> None:
    """Measure a recipe on prompts of the user, or on the zoo's own."""
    from mmspec.bench.latents import compare_latents

    drawing = _drawing(painter, prompt, prompts, batch, seed)
    with progress(json) as report:
        found = compare_latents(
            painter.pipe,
            painter.recipe,
            drawing,
            drafter=painter.drafter,
            names=painter.names,
            window=window,
            repeats=repeats,
            seed=seed,
            progress=report,
        )
    if json:
        emit(found.to_dict())
    else:
        _print(found)


def _drawing(
    painter: Painter, prompt: list[str] | None, prompts: int, batch: int, seed: int
) -> Drawing:
    """The zoo's held-out prompts with the reading of pictures as judge, or what was typed."""
    from mmspec.bench.latents import Drawing

    if prompt is None and painter.is_zoo:
        from mmspec.zoo.prompts import prompts as held_out

        asked = held_out(max(prompts, batch), seed=seed)
        groups = _groups(asked, batch)
        scenes = [one.scene for group in groups for one in group]
        requests = [painter.asked([one.text for one in group]) for group in groups]
        return Drawing(requests, "facts right", lambda drawn: _facts(scenes, drawn))
    texts = prompt or ["0"]
    if len(texts) < batch:
        texts = [texts[index % len(texts)] for index in range(batch)]
    return Drawing([painter.asked(group) for group in _groups(texts, batch)])


def _groups(items: Sequence[Any], batch: int) -> list[Sequence[Any]]:
    """Whole batches."""
    return [items[at : at + batch] for at in range(0, len(items) - batch + 1, batch)]


def _facts(scenes: Sequence[Any], drawn: Sequence[Any]) -> float:
    from mmspec.zoo.reading import read_all, score_picture

    shown = read_all([picture for pictures in drawn for picture in pictures])
    scored = [score_picture(scene, one) for scene, one in zip(scenes, shown, strict=True)]
    return sum(right for right, _ in scored) / sum(asked for _, asked in scored)


def _print(found: LatentComparison) -> None:
    rows: list[tuple[str, Any]] = [
        ("recipe", f"{found.recipe} ({'exact' if found.exact else 'lossy'})"),
        ("model, drafter", [found.model, found.drafter]),
        ("network calls: plain, method", [found.calls_plain, found.calls]),
        ("network calls saved", percent(found.calls_saved)),
        ("network rows: plain, method", [found.rows_plain, found.rows]),
        ("speed-up if rows were free", f"{found.speedup_if_rows_were_free:.2f}x"),
        ("speed-up from the row costs below", _times(found.speedup_from_row_costs)),
        ("measured over the pipeline", _measured(found, "pipeline")),
        ("measured over plain sampling", _measured(found, "plain")),
        ("mean acceptance length", found.mean_acceptance_length),
        ("acceptance rate of drafts", found.draft_acceptance_rate),
        ("measured", f"{found.requests} requests, {found.repeats} repeats, medians"),
        ("where", ", ".join(f"{key} {value}" for key, value in found.environment.items())),
    ]
    if found.quality_pipeline is not None:
        judged = [found.quality_pipeline, found.quality_method]
        rows.append((f"{found.quality_metric}: pipeline, method", judged))
    if found.relative_distance is not None:
        rows.append(("relative distance to plain", found.relative_distance))
        rows.append(("PSNR to plain, dB", found.psnr))
    pairs(rows)
    if found.row_costs:
        console().print()
        table(
            [list(found.row_costs.values())],
            *(f"{n} states" for n in found.row_costs),
            heading="cost of a network call, in calls of one state",
        )


def _measured(found: LatentComparison, name: str) -> str | None:
    value = getattr(found, f"speedup_over_{name}")
    if value is None:
        return None
    low, high = found.spread[f"speedup_over_{name}"]
    return f"{value:.2f}x ({low:.2f} to {high:.2f})"


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"
