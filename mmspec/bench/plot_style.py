"""The style of all plots of measurements. They need matplotlib: `pip install mmspec[plots]`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmspec.tracing.palette import SERIES

MARKS = "osD^vP*X"  # with the colours, so that lines are told apart in grey too
LINES = ("-", "--", ":")  # of the first colours, and of those that return
SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "mmspec",
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "lines.linewidth": 1,
    "errorbar.capsize": 2,
}


@contextmanager
def open_style() -> Iterator[Any]:
    """Pyplot with this style and the file backend. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib; install mmspec[plots]") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {**SETTINGS, "axes.prop_cycle": matplotlib.rcsetup.cycler(color=SERIES)}
    with pyplot.rc_context(settings):
        yield pyplot
        pyplot.close("all")


def pick_style(index: int) -> dict[str, Any]:
    """Colour, mark and line of a series."""
    return {
        "color": SERIES[index % len(SERIES)],
        "marker": MARKS[index % len(MARKS)],
        "linestyle": LINES[index // len(SERIES) % len(LINES)],
    }


def name_axes(axes: Any, x: str, y: str) -> None:
    """Name both axes."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def save_figure(figure: Any, file: Path) -> None:
    """Save without a date, so that the same numbers give the same file."""
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
