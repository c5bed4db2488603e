"""`mmspec bench --modality image` of models with continuous tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmspec.cli.easel import Easel
from mmspec.cli.output import console, emit, pairs, percent, progress, table, times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmspec.bench.continuous import ContinuousComparison, ContinuousRow
    from mmspec.bench.gallery import Gallery

JUDGED_TOGETHER = 32  # pictures per call of those that are only looked at


def bench_continuous(
    easel: Easel,
    recipes: Sequence[str],
    prompt: list[str] | None,
    prompts: int,
    pictures: int,
    batch: int,
    repeats: int,
    seed: int,
    json: bool,
) -> None:
    """Measure recipes on classes of the user, or on the zoo's own."""
    from mmspec.bench.continuous import compare_continuous

    shown = gallery(easel, prompt, prompts, pictures, batch, seed)
    with progress(json) as report:
        found = compare_continuous(
            {name: easel.fast(name) for name in recipes},
            shown,
            easel.settings,
            easel.vae,
            names=easel.names,
            repeats=repeats,
            seed=seed,
            progress=report,
        )
    if json:
        emit(found.to_dict())
    else:
        show(found)


def gallery(
    easel: Easel, prompt: list[str] | None, prompts: int, pictures: int, batch: int, seed: int
) -> Gallery:
    """The zoo's classes with the reading of pictures as judge, or what was typed."""
    from mmspec.bench.gallery import Gallery
    from mmspec.bench.scenes import grouped

    if prompt is None and easel.is_zoo:
        from mmspec.modalities.mar.zoo.evaluate import classes, facts_of

        timed = grouped(classes(max(prompts, batch), seed), batch)
        judged = grouped(classes(pictures, seed + 1), min(JUDGED_TOGETHER, max(pictures, 1)))
        asked = [number for group in judged or timed for number in group]
        return Gallery(
            [{"class_labels": group} for group in timed],
            [{"class_labels": group} for group in judged],
            lambda drawn: facts_of(asked, drawn),
        )
    texts = prompt or ["0"]
    texts = [texts[index % len(texts)] for index in range(max(len(texts), batch))]
    return Gallery([easel.asked(group) for group in grouped(texts, batch)])


def show(found: ContinuousComparison) -> None:
    """The table, and below it how it was measured."""
    titles = ("recipe", "output", "target calls", "fewer", "over plain", "acceptance", "rate")
    rows = [line(row, found.rows[0].calls) for row in found.rows]
    table(rows, *titles, "draft share", "facts", "to plain")
    console().print()
    settings = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    where = ", ".join(f"{key} {value}" for key, value in found.environment.items())
    pairs(
        [
            ("model, drafter", [found.model, found.drafter]),
            ("settings", settings),
            ("timed", f"{found.requests} requests, {found.repeats} repeats, medians"),
            ("judged", f"{found.pictures} pictures per row"),
            ("where", where),
        ]
    )


def line(row: ContinuousRow, plain: float) -> list[Any]:
    """One row of the table."""
    rate, share, apart = row.draft_acceptance_rate, row.draft_share, row.facts_gap
    return [
        row.recipe,
        "exact" if row.exact else "lossy",
        row.calls,
        times(plain / row.calls),
        times(row.speedup_over_plain, row.spread),
        row.mean_acceptance_length,
        None if rate is None else percent(rate),
        None if share is None else percent(share),
        None if row.facts_right is None else f"{100 * row.facts_right:.1f} %",
        None
        if apart is None
        else f"{100 * apart:+.1f} \u00b1 {100 * (row.facts_gap_error or 0):.1f}",
    ]
