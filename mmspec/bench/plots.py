"""Plots of measurements. They need matplotlib: `pip install mmspec[plots]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.bench.plot_style import name_axes, open_style, pick_style, save_figure
from mmspec.bench.ranking import Ranking
from mmspec.bench.results.page import Section
from mmspec.bench.studies.compressors import Catalogue
from mmspec.bench.studies.frontier import PLAIN as FEWER
from mmspec.bench.studies.frontier import Frontier
from mmspec.bench.studies.sweep import Sweep
from mmspec.tracing.palette import BLACK, BLUE, GREY, SERIES, VERMILION

NUMBER: dict[str, Any] = {"fontsize": 7, "xytext": (3, 3), "textcoords": "offset points"}
MOST_WORK = 1.05  # on the axis of a frontier
ROW_INCHES = 0.17  # of a ranking
KINDS: dict[str, dict[str, Any]] = {  # of recipes: how they are drawn
    "exact": {"color": BLUE, "marker": "o"},
    "lossy": {"color": VERMILION, "marker": "D", "markerfacecolor": "none"},
}
PAPER: dict[str, Any] = {"color": "black", "marker": "|", "markersize": 9, "linestyle": ""}


def plot_relaxations(found: Sweep, file: Path) -> None:
    """Plot speed against quality of relaxed recipes, one line per recipe over its option.

    Raises ValueError without matplotlib.
    """
    qualities = list(found.points[0].row.qualities)
    with open_style() as pyplot:
        size = (5 * (2 + len(qualities)), 3.75)
        figure, axes = pyplot.subplots(1, 2 + len(qualities), figsize=size, layout="constrained")
        for index, recipe in enumerate(dict.fromkeys(point.recipe for point in found.points)):
            rows = [point.flat() for point in found.points if point.recipe == recipe]
            style = {**pick_style(index), "label": recipe}
            _line(axes[0], rows, "distance", "fewer_calls", style)
            _line(axes[1], rows, "fewer_calls", "speedup_over_plain", style)
            for place, quality in zip(axes[2:], qualities, strict=True):
                gap = (f"{quality} gap", style, f"{quality} gap_error")
                _line(place, rows, "fewer_calls", *gap)
        name_axes(axes[0], "over-accepted mass per token", "times fewer target calls")
        name_axes(axes[1], "times fewer target calls", "wall-clock speed-up")
        for place, quality in zip(axes[2:], qualities, strict=True):
            place.axhline(0, color="0.6", linestyle=":")
            name_axes(place, "times fewer target calls", f"{quality}, less that of plain")
        axes[1].legend()  # every recipe has a time, some have no mass
        save_figure(figure, file)


def plot_frontier(found: Frontier, file: Path) -> None:
    """Plot the distance of lossy images over calls and over work, beside fewer steps (black).

    The axis of work ends a little above that of the pipeline. Raises ValueError without matplotlib.
    """
    with open_style() as pyplot:
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
        for index, recipe in enumerate(dict.fromkeys(point.recipe for point in found.points)):
            points = [one for one in found.points if one.recipe == recipe]
            rows = [{**one.flat(), "ink": one.distance} for one in points]
            skipped = index >= SERIES.index(BLACK)  # that of fewer steps
            style: dict[str, Any] = {**pick_style(index + skipped), "label": recipe}
            style |= {"color": BLACK, "linestyle": "-", "linewidth": 2} if recipe == FEWER else {}
            for place, across in zip(axes, ("calls", "work"), strict=True):
                _line(place, sorted(rows, key=lambda row: row["calls"]), across, "ink", style)
        name_axes(axes[0], "network calls in full", "PSNR on ink to all steps, dB")
        name_axes(axes[1], "share of the network's operations", "")
        axes[1].set_xlim(0, MOST_WORK)
        axes[0].legend()
        save_figure(figure, file)


def plot_compressors(found: Catalogue, file: Path) -> None:
    """Plot acceptance, draft model prefill and speed-up over the share of kept tokens.

    Raises ValueError without matplotlib.
    """
    columns = {
        "mean_acceptance_length": "mean acceptance length",
        "drafter_prefill_ms": "drafter prefill, ms",
        "speedup_end_to_end": "speed-up end to end, least to most",
    }
    with open_style() as pyplot:
        figure, axes = pyplot.subplots(1, len(columns), figsize=(15, 4.5), layout="constrained")
        rows = [point.flat() for point in found.points]
        for place, (column, title) in zip(axes, columns.items(), strict=True):
            for index, row in enumerate(rows):
                style = {**pick_style(index), "linestyle": "", "label": row["compressor"]}
                if row[column] is None:
                    continue
                ends = (row["speedup_least"], row["speedup_most"])
                spread = _spread([row[column]], [ends]) if column == "speedup_end_to_end" else None
                hollow = {**style, "markerfacecolor": "none"}
                place.errorbar([row["kept"]], [row[column]], spread, **hollow)
            name_axes(place, "share of visual tokens kept", title)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        save_figure(figure, file)


def plot_ranking(found: Ranking, file: Path) -> None:
    """Plot speed with its spread, and acceptance length, a row per recipe as in the table.

    Lossy recipes are hollow. Raises ValueError without matplotlib.
    """
    rows = [one.flat() for one in found.points]
    with open_style() as pyplot:
        size = (8.5, 1.2 + ROW_INCHES * len(rows))
        figure, axes = pyplot.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
        for kind, style in KINDS.items():
            places = [at for at, one in enumerate(rows) if one["output"] == kind]
            _bars(axes[0], rows, places, "speed", {**style, "label": kind})
            _bars(axes[1], rows, places, "acceptance_length", style)
        axes[0].set_yticks(range(len(rows)), [one["recipe"] for one in rows], fontsize=7)
        axes[0].set_ylim(len(rows) - 0.4, -0.6)
        axes[0].axvline(1, color="0.4", linestyle=":")
        axes[0].legend(loc="lower right")
        name_axes(axes[0], "speed-up end to end, least to most", "recipe, fastest first")
        axes[1].set_xlabel("mean acceptance length")
        save_figure(figure, file)


def _bars(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    places: Sequence[int],
    column: str,
    style: Mapping[str, Any],
) -> None:
    """Draw a value per row, with its spread where it has one."""
    known = [at for at in places if rows[at][column] is not None]
    values = [rows[at][column] for at in known]
    ends = [(rows[at]["least"], rows[at]["most"]) for at in known]
    spread = _spread(values, ends) if column == "speed" else None
    axes.errorbar(values, known, xerr=spread, linestyle="", markersize=4, **style)


def _spread(
    values: Sequence[float], ends: Sequence[tuple[float | None, float | None]]
) -> list[list[float]]:
    """Lengths of error bars down to the least value and up to the most; 0 where not known."""
    pairs = zip(values, ends, strict=True)
    known = [[value if one is None else one for one in pair] for value, pair in pairs]
    below = [max(value - least, 0.0) for value, (least, _) in zip(values, known, strict=True)]
    above = [max(most - value, 0.0) for value, (_, most) in zip(values, known, strict=True)]
    return [below, above]


def plot_section(found: Section, file: Path) -> None:
    """Plot the speed of all lines with its spread, the fastest on top, and the papers' figures.

    Raises ValueError without matplotlib.
    """
    lines = [one for one in reversed(found.lines) if one.speed is not None]
    styles = {"baseline": {"color": GREY, "marker": "s"}, **KINDS}
    with open_style() as pyplot:
        size = (8, 1.2 + 0.22 * len(lines))
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        for height, line in enumerate(lines):
            kind = line.promise if line.headline is not None else "baseline"
            speed = line.speed or 0.0
            bar = _spread([speed], [(line.least, line.most)])
            style = {**styles[kind or "baseline"], "linestyle": "", "markersize": 5}
            axes.errorbar([speed], [height], xerr=bar, **style)
            if line.best is not None:
                axes.plot([line.best], [height], **PAPER)
        for kind, style in {**styles, "paper": PAPER}.items():
            axes.plot([], [], **{"linestyle": "", **style, "label": kind})
        axes.set_yticks(range(len(lines)), [line.name for line in lines])
        axes.set_ylim(-0.6, len(lines) - 0.4)
        axes.axvline(1, color="0.4", linestyle=":")
        axes.legend(fontsize=7)
        name_axes(axes, "speed, end to end, with the least and the most", "system, fastest on top")
        save_figure(figure, file)


def _line(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    style: Mapping[str, Any],
    error: str = "",
) -> None:
    """Draw a line through the points that have both values, annotated with option values."""
    both = [one for one in rows if one.get(x) is not None and one.get(y) is not None]
    if not both:
        return
    across, up = ([one[name] for one in both] for name in (x, y))
    bars = [one[error] for one in both] if error else None
    axes.errorbar(across, up, bars, markersize=4, **style)
    if x == "distance":
        for one, *place in zip(both, across, up, strict=True):
            axes.annotate(f"{one['value']:g}", place, **NUMBER)
