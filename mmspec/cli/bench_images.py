"""`mmspec bench --modality image`: recipes that draw with picture tokens, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmspec.cli import drawing
from mmspec.cli.drawing import Studio
from mmspec.cli.output import console, emit, pairs, progress, table, times

if TYPE_CHECKING:
    from mmspec.bench.gallery import Gallery
    from mmspec.bench.images import ImageComparison, ImageRow

RECIPES = (  # measured where none is named; those that need a draft model come last
    *("sjd", "sjd2", "sjd-pp", "mc-sjd", "mc-sjd-gumbel", "sjd-pac", "gsd", "zipar"),
    *("draft-verify", "coupled", "speculative-sampling", "recursive-rejection", "eagle", "eagle-2"),
    *("cool-sd", "lantern", "lantern-pp", "vvs", "mulo-sd"),
)
JUDGED_TOGETHER = 16  # pictures per call of those that are only looked at


def bench_images(
    model: str,
    drafter: str | None,
    recipes: Sequence[str] | None,
    prompt: list[str] | None,
    settings: dict[str, Any],
    parts: dict[str, Any],
    prompts: int,
    pictures: int,
    batch: int,
    repeats: int,
    seed: int,
    peers: bool,
    json: bool,
) -> None:
    """Measure recipes on prompts of the user, or on the zoo's own."""
    from mmspec.bench.images import compare_images

    chosen = recipes or RECIPES
    studio = drawing.load(model, drafter, chosen)
    shown = gallery(studio, prompt, prompts, pictures, batch, seed)
    with progress(json) as report:
        found = compare_images(
            {name: studio.fast(name, **parts) for name in chosen},
            shown,
            settings,
            model=studio.name,
            drafters={name: studio.drafter(name)[0] for name in chosen},
            repeats=repeats,
            seed=seed,
            peers=peers,
            progress=report,
        )
    if json:
        emit(found.to_dict())
    else:
        show(found)


def gallery(
    studio: Studio, prompt: list[str] | None, prompts: int, pictures: int, batch: int, seed: int
) -> Gallery:
    """The zoo's held-out prompts with the reading of pictures as judge, or what was typed."""
    from mmspec.bench.gallery import Gallery
    from mmspec.bench.scenes import facts, from_zoo, grouped

    if prompt is None and studio.is_zoo:
        groups, scenes = from_zoo(max(prompts, batch), batch, seed)
        timed = [studio.asked(group) for group in groups]
        if not pictures:
            return Gallery(timed, judge=lambda drawn: facts(scenes, drawn))
        together = min(JUDGED_TOGETHER, pictures)
        many, all_scenes = from_zoo(pictures, together, seed + 1)
        judged = [studio.asked(group) for group in many]
        return Gallery(timed, judged, lambda drawn: facts(all_scenes, drawn))
    texts = prompt or ["0"]
    texts = [texts[index % len(texts)] for index in range(max(len(texts), batch))]
    return Gallery([studio.asked(group) for group in grouped(texts, batch)])


def show(found: ImageComparison) -> None:
    """The table, and below it how it was measured."""
    titles = ("recipe", "output", "fewer calls", "over plain", "over generate()", "acceptance")
    more = ("facts", "to plain", "log p", "over-accepted", "efficiency")
    table([line(row) for row in found.rows], *titles, *more)
    console().print()
    own = found.generate
    about = own.get("skipped")
    if about is None:
        about = f"{times(own['speedup_over_plain'])} of plain, log p {own['log_likelihood']:.2f}"
    settings = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    where = ", ".join(f"{key} {value}" for key, value in found.environment.items())
    pairs(
        [
            ("model", found.model),
            ("a picture", f"{found.codes} codes; {settings}"),
            ("the model's own loop", about),
            ("timed", f"{found.requests} requests, {found.repeats} repeats, medians"),
            ("judged", f"{found.pictures} pictures per recipe"),
            ("where", where),
        ]
    )


def line(row: ImageRow) -> list[Any]:
    """One recipe's row of the table."""
    own, gap = row.speedup_over_generate, row.facts_gap
    return [
        row.recipe,
        "exact" if row.exact else "lossy",
        times(row.fewer_calls),
        times(row.speedup_over_plain, row.spread["plain"]),
        None if own is None else times(own, row.spread["generate"]),
        row.mean_acceptance_length,
        None if row.facts_right is None else f"{100 * row.facts_right:.1f} %",
        None if gap is None else f"{100 * gap:+.1f} \u00b1 {100 * (row.facts_gap_error or 0):.1f}",
        f"{row.log_likelihood:.2f} \u00b1 {row.log_likelihood_error:.2f}",
        row.over_accepted_mass,
        row.engine_efficiency,
    ]
