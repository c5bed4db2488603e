"""Lines of the page: one per system and baseline, with ranks and why the figures differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmspec import recipes, zoo
from mmspec.bench.ranking import RankedRecipe
from mmspec.bench.results.records import Record
from mmspec.bench.results.systems import SOURCE, Group, Job, System
from mmspec.bench.row import BASELINE_TITLES, Row
from mmspec.recipe import STATES
from mmspec.registry import ZOO

PLAIN = "plain"
DIFFERS = {
    "reached": "at least the paper's figure",
    "scale": "as few target calls as the figure needs, but drafts and calls of several tokens take "
    "a larger share of the time than on a large model and an accelerator",
    "drafter": "the trained drafter is accepted too seldom",
    "task": "without a trained drafter, these requests are harder to guess, or other ones",
    "measure": "the figure is not the speed over plain decoding",
    "hardware": "the figure needs several devices",
}


@dataclass(frozen=True)
class Line:
    """One line of the page; None = not applicable, or not measured."""

    section: str
    name: str
    model: str
    recipe: str | None = None
    is_system: bool = False
    promise: str | None = None  # "exact" or "lossy"
    drafter: str | None = None
    trained: str | None = None
    saw: str | None = None
    acceptance_length: float | None = None
    fewer_calls: float | None = None
    fewer_calls_error: float | None = None
    speed: float | None = None  # end to end, over the library's own call or else plain decoding
    least: float | None = None
    most: float | None = None
    rank: str | None = None
    quality: str | None = None  # the name of the measure
    value: float | None = None
    error: float | None = None
    plain_value: float | None = None
    second_quality: str | None = None
    second_value: float | None = None
    headline: str | None = None
    best: float | None = None  # its upper end
    headline_is: str | None = None
    source: str | None = None
    paper: str | None = None
    differs: str | None = None
    note: str | None = None


def lines_of(job: Job, record: Record | None, why: str | None = None) -> list[Line]:
    """The lines of a job: of its baselines, or of a system with its variants and controls.

    `why` there is no record; default: it is not measured yet.
    """
    if job.system is None:
        return [] if record is None else _baselines(job, record)
    if record is None:
        return [_unmeasured(job, why or "not measured yet")]
    own = [_line(job, row, record) for row in record.rows if row.recipe != PLAIN]
    controls = [
        row
        for row in record.baselines
        if row.skipped is None and ("," in row.recipe or not job.recipes)  # all those of a study
    ]
    return [*own, *(_line(job, row, record, f"{job.name}: ") for row in controls)]


def _baselines(job: Job, record: Record) -> list[Line]:
    """Lines of baselines; their names have the target where it is not that of the section."""
    rows = [row for row in (*record.baselines, *record.rows) if row.skipped is None]
    made = [_line(job, row, record) for row in rows]
    for name, why in record.left_out.items():
        made.append(
            Line(job.group.name, BASELINE_TITLES.get(name, name), job.model, note=_shorten(why))
        )
    if job.model == job.group.model:
        return made
    return [replace(one, name=f"{one.name}, {job.model}") for one in made]


def rank(lines: Sequence[Line]) -> list[Line]:
    """Sort a section by speed; lines whose spreads overlap share ranks, as in "2-4"."""
    timed = [one for one in lines if one.speed is not None]
    timed.sort(key=lambda one: -(one.speed or 0.0))
    spans = [(one.least or one.speed or 0.0, one.most or one.speed or 0.0) for one in timed]
    found = []
    for one, (least, most) in zip(timed, spans, strict=True):
        best = 1 + sum(low > most for low, _ in spans)
        worst = len(spans) - sum(high < least for _, high in spans)
        found.append(replace(one, rank=str(best) if best == worst else f"{best}-{worst}"))
    return [*found, *(one for one in lines if one.speed is None)]


def explain(system: System, speed: float | None, fewer: float | None, trained: bool) -> str | None:
    """One of `DIFFERS`: why the figure is not that of the paper. None where either is missing."""
    if system.best is None or speed is None:
        return None
    if system.differs is not None:
        return system.differs
    if speed >= system.best:
        return "reached"
    if fewer is not None and fewer >= system.best:
        return "scale"
    return "drafter" if trained else "task"


def _line(job: Job, row: Row, record: Record, prefix: str = "") -> Line:
    """The line of one measured row."""
    timed = RankedRecipe(row).flat()
    recipe, _, variant = row.recipe.partition(", ")
    is_ours = recipe in job.runners
    drafters = record.settings["drafters"]
    drafter = drafters.get(recipe) if is_ours else None
    if recipe.startswith("assisted"):  # the library's, with the first draft model of the job
        drafter = next(filter(None, drafters.values()), None)
    name = job.name if job.system is not None and is_ours else recipe
    title = ", ".join(filter(None, (name, variant)))
    own = None if job.system is None or prefix else job.system
    speed, fewer, better = timed["speed"], row.fewer_calls, row.extras.get("beaten by")
    reported: dict[str, Any] = {} if own is None else _reported(own)
    if own is not None:
        reported["differs"] = explain(own, speed, fewer, drafter is not None)
    return Line(
        section=job.group.name,
        name=prefix + (title if prefix else BASELINE_TITLES.get(title, title)),
        model=job.model,
        recipe=recipe if recipe in job.recipes else None,
        is_system=own is not None and not variant,
        promise=timed["output"],
        drafter=drafter,
        trained=_describe_training(job, drafter, recipe if is_ours else None),
        saw=row.drafter_saw,
        acceptance_length=row.mean_acceptance_length,
        fewer_calls=fewer,
        fewer_calls_error=row.fewer_calls_error,
        speed=speed,
        least=timed["least"],
        most=timed["most"],
        **_qualities(job.group, row, record),
        **reported,
        note=row.fallback
        or (f"beaten by {better}" if better else None)
        or (None if own is None or variant else own.without),
    )


def _unmeasured(job: Job, why: str) -> Line:
    assert job.system is not None
    recipe = next(iter(job.recipes), None)
    is_exact = recipe is not None and recipes.describe(recipe)["exact"]
    own: dict[str, Any] = {
        "is_system": True,
        "promise": "exact" if is_exact else "lossy",
        "recipe": recipe,
        "note": _shorten(why),
    }
    return Line(job.group.name, job.name, job.model, **own, **_reported(job.system))


def _shorten(why: str) -> str:
    """A reason in half a line."""
    why = re.sub(r"^recipe '[^']*' needs", "needs", " ".join(why.split()))
    return why.replace("; give --drafter DIR or zoo:NAME", ", and none is bundled")


def _reported(system: System) -> dict[str, Any]:
    """What the paper reports."""
    return {
        "headline": system.headline,
        "best": system.best,
        "headline_is": system.of,
        "source": SOURCE,
        "paper": system.paper,
    }


def _qualities(group: Group, row: Row, record: Record) -> dict[str, Any]:
    """The measures of a section that a row has, the first with its error and that of plain."""
    known = [name for name in group.quality if name in row.qualities or name in row.extras]
    if not known:
        return {}
    value, error, plain = _quality(known[0], row, record)
    found: dict[str, Any] = {
        "quality": known[0],
        "value": value,
        "error": error,
        "plain_value": plain,
    }
    if len(known) > 1:
        found |= {"second_quality": known[1], "second_value": _quality(known[1], row, record)[0]}
    return found


def _quality(
    name: str, row: Row, record: Record
) -> tuple[float | None, float | None, float | None]:
    """Value, error and the value of plain decoding."""
    if name in row.qualities:
        one = row.qualities[name]
        value, gap = one["value"], one["gap"]
        return value, one["error"], None if value is None or gap is None else value - gap
    span = row.extras.get(f"{name}, 95 %")
    error = None if span is None else (span["high"] - span["low"]) / 2 / 1.96
    plain = next((one.extras.get(name) for one in record.rows if one.recipe == PLAIN), None)
    return row.extras[name], error, plain


def _describe_training(job: Job, drafter: str | None, recipe: str | None) -> str | None:
    """How the draft model was trained; of a study, how the model that reads the drafts was."""
    if drafter is None or job.recipes:
        return None if drafter is None else describe_training(drafter, recipe)
    return f"for {job.model}, {describe_training(job.model)}"


def describe_training(drafter: str, recipe: str | None = None) -> str:
    """Who trained a draft model and how: by its card, and of a head by the stages of its recipe."""
    if not drafter.startswith(ZOO):
        return "given by the user"
    card, entry = _read_card(drafter), zoo.info(drafter)
    loss = card.get("losses")
    if loss is None and recipe is not None and entry.sees == STATES:
        loss = recipes.describe(recipe)["parts"]["draft optimisation"]
    minutes = card.get("training minutes") or card.get("minutes")
    parts = [loss or entry.description.partition(";")[0].rstrip(".")]
    if card.get("steps") != "0":  # those of its target otherwise
        parts += [f"{int(card['steps']):,} steps"] if card.get("steps", "").isdecimal() else []
        parts += [f"{float(minutes):.0f} min"] if minutes else []
    return f"here: {', '.join(parts)}"


def _read_card(drafter: str) -> Mapping[str, str]:
    """The table of the card of a bundled checkpoint."""
    text = (zoo.path(drafter) / "README.md").read_text(encoding="utf-8")
    pairs = re.findall(r"^\| ([\w ]+) \| (.+?) \|$", text, re.MULTILINE)
    return {name.replace("_", " "): value for name, value in pairs}
