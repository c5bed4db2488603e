"""`mmspec bench` for pipelines that draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmspec.cli.output import console, emit, pairs, percent, progress, table, times
from mmspec.cli.painting import Painter

if TYPE_CHECKING:
    from mmspec.bench.latents import Drawing, LatentComparison


def bench_pictures(
    painter: Painter,
    prompt: list[str] | None,
    prompts: int,
    batch: int,
    parts: Mapping[str, Any],
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
            repeats=repeats,
            seed=seed,
            progress=report,
            **parts,
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
    from mmspec.bench.scenes import grouped

    if prompt is None and painter.is_zoo:
        from mmspec.bench.scenes import facts_right, from_zoo

        groups, scenes = from_zoo(max(prompts, batch), batch, seed)
        requests = [painter.asked(group) for group in groups]
        return Drawing(requests, "facts right", lambda drawn: facts_right(scenes, drawn))
    texts = prompt or ["0"]
    if len(texts) < batch:
        texts = [texts[index % len(texts)] for index in range(batch)]
    return Drawing([painter.asked(group) for group in grouped(texts, batch)])


def _print(found: LatentComparison) -> None:
    rows: list[tuple[str, Any]] = [
        ("recipe", f"{found.recipe} ({'exact' if found.exact else 'lossy'})"),
        ("model, drafter", [found.model, found.drafter]),
        ("network calls: plain, method", [found.calls_plain, found.calls]),
        ("network calls saved", percent(found.calls_saved)),
        ("network rows: plain, method", [found.rows_plain, found.rows]),
        ("speed-up if rows were free", times(found.speedup_if_rows_were_free)),
        ("speed-up from the row costs below", _costed(found)),
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
    pairs(rows + lost(found.to_dict()))
    if found.row_costs:
        console().print()
        table(
            [list(found.row_costs.values())],
            *(f"{n} states" for n in found.row_costs),
            heading="cost of a network call, in calls of one state",
        )


def lost(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """How far the pictures of a lossy recipe are from those of the same noise."""
    if document["relative_distance"] is None:
        return []
    wanted = "the pipeline" if document["speedup_over_plain"] is None else "plain"
    similarity = document["ssim"]
    missing = "not measured; pip install mmspec[quality]"
    return [
        (f"relative distance to {wanted}", document["relative_distance"]),
        (f"PSNR to {wanted}, dB", document["psnr"]),
        (f"SSIM to {wanted}", missing if similarity is None else f"{similarity:.4f}"),
    ]


def _measured(found: LatentComparison, name: str) -> str | None:
    value = getattr(found, f"speedup_over_{name}")
    if value is None:
        return None
    return times(value, found.spread[f"speedup_over_{name}"])


def _costed(found: LatentComparison) -> str | None:
    value = found.speedup_from_row_costs
    return None if value is None else times(value)
