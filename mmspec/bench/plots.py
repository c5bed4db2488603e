"""Plots of measurements. They need matplotlib: `pip install mmspec[plots]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec.bench.sweep import Point, Sweep

MARKS = "osD^vP*X"
NUMBER: dict[str, Any] = {"fontsize": 7, "xytext": (3, 3), "textcoords": "offset points"}


def relaxed(found: Sweep, file: Path) -> None:
    """What relaxed recipes gain against what they lose, one line per recipe over its knob.

    Raises ValueError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib; install mmspec[plots]") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {"svg.hashsalt": "mmspec", "font.size": 9}
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
        for index, recipe in enumerate(dict.fromkeys(point.recipe for point in found.points)):
            points = [point for point in found.points if point.recipe == recipe]
            mark = MARKS[index % len(MARKS)]
            how: dict[str, Any] = {"color": f"C{index}", "marker": mark, "label": recipe}
            _line(axes[0, 0], points, "over_accepted_mass", "fewer_calls", how)
            _line(axes[0, 1], points, "fewer_calls", "facts_gap", how, "facts_gap_error")
            _line(axes[1, 0], points, "fewer_calls", "log_likelihood", how, "log_likelihood_error")
            _line(axes[1, 1], points, "fewer_calls", "speedup_over_plain", how)
        axes[0, 1].axhspan(-0.02, 0.02, color="0.92", zorder=0)
        axes[1, 0].axhline(found.plain[0].log_likelihood, color="0.6", linestyle=":")
        _name(axes[0, 0], "over-accepted mass per code", "times fewer target calls")
        _name(axes[0, 1], "times fewer target calls", "facts right, less those of plain")
        _name(axes[1, 0], "times fewer target calls", "log-likelihood per code")
        _name(axes[1, 1], "times fewer target calls", "wall-clock speed-up")
        axes[1, 1].legend()  # every recipe has a time, not every one a mass
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)


def _line(
    axes: Any, points: Sequence[Point], x: str, y: str, how: dict[str, Any], error: str = ""
) -> None:
    """A line through the points that have both; every point says its knob's value."""
    both = [one for one in points if getattr(one, x) is not None and getattr(one, y) is not None]
    if not both:
        return
    across, up = ([getattr(one, name) for one in both] for name in (x, y))
    bars = [getattr(one, error) for one in both] if error else None
    axes.errorbar(across, up, bars, markersize=4, linewidth=1, capsize=2, **how)
    if x == "over_accepted_mass":
        for one, *place in zip(both, across, up, strict=True):
            axes.annotate(f"{one.value:g}", place, **NUMBER)


def _name(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
