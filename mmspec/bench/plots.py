"""Plots of measurements. They need matplotlib: `pip install mmspec[plots]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.bench.ranking import Ranking
from mmspec.bench.results.page import Section
from mmspec.bench.studies.compressors import Catalogue
from mmspec.bench.studies.sweep import Sweep

MARKS = "osD^vP*X"
EXACT, LOSSY, BASELINE, PAPER = "#0072B2", "#D55E00", "#999999", "#000000"  # Okabe and Ito
SETTINGS: dict[str, Any] = {"svg.hashsalt": "mmspec", "font.size": 9}
NUMBER: dict[str, Any] = {"fontsize": 7, "xytext": (3, 3), "textcoords": "offset points"}


def plot_relaxations(found: Sweep, file: Path) -> None:
    """Plot speed against quality of relaxed recipes, one line per recipe over its knob.

    Raises ValueError without matplotlib.
    """
    pyplot = _pyplot()
    qualities = list(found.points[0].row.qualities)
    with pyplot.rc_context(SETTINGS):
        size = (5 * (2 + len(qualities)), 3.75)
        figure, axes = pyplot.subplots(1, 2 + len(qualities), figsize=size, layout="constrained")
        for index, recipe in enumerate(dict.fromkeys(point.recipe for point in found.points)):
            rows = [point.flat() for point in found.points if point.recipe == recipe]
            mark = MARKS[index % len(MARKS)]
            style: dict[str, Any] = {"color": f"C{index}", "marker": mark, "label": recipe}
            _line(axes[0], rows, "distance", "fewer_calls", style)
            _line(axes[1], rows, "fewer_calls", "speedup_over_plain", style)
            for place, quality in zip(axes[2:], qualities, strict=True):
                gap = (f"{quality} gap", style, f"{quality} gap_error")
                _line(place, rows, "fewer_calls", *gap)
        _name(axes[0], "over-accepted mass per token", "times fewer target calls")
        _name(axes[1], "times fewer target calls", "wall-clock speed-up")
        for place, quality in zip(axes[2:], qualities, strict=True):
            place.axhline(0, color="0.6", linestyle=":")
            _name(place, "times fewer target calls", f"{quality}, less that of plain")
        axes[1].legend()  # every recipe has a time, some have no mass
        _save(figure, file)
        pyplot.close(figure)


def _pyplot() -> Any:
    """Return pyplot with the file backend. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib; install mmspec[plots]") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, file: Path) -> None:
    """Save without a date, so that the same numbers give the same file."""
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def plot_compressors(found: Catalogue, file: Path) -> None:
    """Plot acceptance, draft model prefill and speed-up over the share of kept tokens.

    Raises ValueError without matplotlib.
    """
    pyplot = _pyplot()
    columns = {
        "mean_acceptance_length": "mean acceptance length",
        "drafter_prefill_ms": "drafter prefill, ms",
        "speedup_end_to_end": "speed-up end to end",
    }
    with pyplot.rc_context(SETTINGS):
        figure, axes = pyplot.subplots(1, len(columns), figsize=(15, 4.5), layout="constrained")
        rows = [point.flat() for point in found.points]
        for place, (column, title) in zip(axes, columns.items(), strict=True):
            for index, row in enumerate(rows):
                style: dict[str, Any] = {"color": f"C{index}", "marker": MARKS[index % len(MARKS)]}
                style |= {"linestyle": "", "markerfacecolor": "none", "label": row["compressor"]}
                if row[column] is not None:
                    place.plot([row["kept"]], [row[column]], **style)
            _name(place, "share of visual tokens kept", title)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
        _save(figure, file)
        pyplot.close(figure)


def plot_ranking(found: Ranking, file: Path) -> None:
    """Plot speed over acceptance length, numbered as in the table; lossy recipes are hollow.

    Raises ValueError without matplotlib.
    """
    pyplot = _pyplot()
    with pyplot.rc_context(SETTINGS):
        lines = [f"{place}  {one.row.recipe}" for place, one in enumerate(found.points, 1)]
        height = max(4.5, 0.125 * len(lines))
        figure, axes = pyplot.subplots(figsize=(10, height), layout="constrained")
        for place, point in enumerate(found.points, 1):
            if point.row.mean_acceptance_length is None:
                continue
            at, colour = (point.row.mean_acceptance_length, point.speed), f"C{place % 10}"
            face = colour if point.row.exact else "none"
            axes.plot(*at, "o", color=colour, markerfacecolor=face, markersize=5)
            axes.annotate(str(place), at, **NUMBER)
        axes.axhline(1, color="0.6", linestyle=":")
        style: dict[str, Any] = {"transform": axes.transAxes, "va": "top", "fontsize": 7}
        axes.text(1.02, 1.0, "\n".join(lines), **style)
        _name(axes, "mean acceptance length", "speed-up end to end")
        _save(figure, file)
        pyplot.close(figure)


def plot_section(found: Section, file: Path) -> None:
    """Plot the speed of all lines with its spread, the fastest on top, and the papers' figures.

    Raises ValueError without matplotlib.
    """
    pyplot = _pyplot()
    lines = [one for one in reversed(found.lines) if one.speed is not None]
    styles = {"baseline": (BASELINE, "s"), "exact": (EXACT, "o"), "lossy": (LOSSY, "^")}
    with pyplot.rc_context(SETTINGS):
        size = (8, 1.2 + 0.22 * len(lines))
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        for height, line in enumerate(lines):
            kind = line.promise if line.headline is not None else "baseline"
            colour, mark = styles[kind or "baseline"]
            speed = line.speed or 0.0
            least, most = (speed if one is None else one for one in (line.least, line.most))
            bar = [[max(speed - least, 0.0)], [max(most - speed, 0.0)]]
            style: dict[str, Any] = {"color": colour, "markersize": 5, "capsize": 3}
            axes.errorbar([speed], [height], xerr=bar, fmt=mark, **style)
            if line.best is not None:
                axes.plot([line.best], [height], "|", color=PAPER, markersize=9)
        for kind, (colour, mark) in {**styles, "paper": (PAPER, "|")}.items():
            axes.plot([], [], mark, color=colour, linestyle="", label=kind)
        axes.set_yticks(range(len(lines)), [line.name for line in lines])
        axes.axvline(1, color="0.6", linestyle=":")
        axes.legend(fontsize=7)
        _name(axes, "speed, end to end, with the least and the most", "")
        _save(figure, file)
        pyplot.close(figure)


def _line(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    style: Mapping[str, Any],
    error: str = "",
) -> None:
    """Draw a line through the points that have both values, annotated with knob values."""
    both = [one for one in rows if one.get(x) is not None and one.get(y) is not None]
    if not both:
        return
    across, up = ([one[name] for one in both] for name in (x, y))
    bars = [one[error] for one in both] if error else None
    axes.errorbar(across, up, bars, markersize=4, linewidth=1, capsize=2, **style)
    if x == "distance":
        for one, *place in zip(both, across, up, strict=True):
            axes.annotate(f"{one['value']:g}", place, **NUMBER)


def _name(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
