"""Rank the recipes of a benchmark by speed, as CSV or Markdown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.bench.compare import PLAIN, Comparison
from mmspec.bench.reporting import PointTable
from mmspec.bench.row import BASELINE_TITLES, Row

TITLES = {
    "recipe": "recipe",
    "speed": "end to end",
    "least": "least",
    "most": "most",
    "acceptance_length": "acceptance length",
    "fewer_calls": "fewer calls",
    "fewer_calls_error": "error",
    "output": "output",
    "drafter": "drafter",
}

NOTES = (
    "Speed-ups are over the first baseline, medians with minimum and maximum; the error is the",
    "standard error of fewer calls, over requests.",
)


@dataclass(frozen=True)
class RankedRecipe:
    """One runner of a benchmark."""

    row: Row

    @property
    def speed(self) -> float | None:
        """End-to-end speed-up over the first baseline, or over plain decoding without one."""
        over = self.row.speedup_end_to_end
        return self.row.speedup_over_plain if over is None else over

    def flat(self) -> dict[str, Any]:
        """Return one table row."""
        one, none = self.row, (None, None)
        name = "speedup_over_plain" if one.speedup_end_to_end is None else "speedup_end_to_end"
        minimum, maximum = one.spread.get(name, none)
        return {
            "recipe": one.recipe,
            "speed": self.speed,
            "least": minimum,
            "most": maximum,
            "acceptance_length": one.mean_acceptance_length,
            "fewer_calls": one.fewer_calls,
            "fewer_calls_error": one.fewer_calls_error,
            "output": "exact" if one.exact else "lossy",
            "drafter": one.drafter,
        }


@dataclass(frozen=True)
class Ranking(PointTable):
    """Runners of one benchmark, the fastest first, and what was skipped."""

    points: list[RankedRecipe]
    left_out: Mapping[str, str]  # name -> reason
    model: str
    about: str  # settings of the measurement

    @classmethod
    def of(cls, found: Comparison, left_out: Mapping[str, str]) -> Ranking:
        """Rank recipes, plain decoding, the library's own methods, and controls."""
        ran = (*found.rows, *found.baselines, *found.controls)
        lines = [RankedRecipe(row) for row in ran if row.skipped is None]
        timed = [line for line in lines if line.speed is not None]
        timed.sort(key=lambda line: -(line.speed or 0.0))
        settings = ", ".join(f"{name} {value}" for name, value in found.settings.items())
        about = (
            f"{settings}; {found.requests} requests, {found.repeats} repeats, batch "
            f"{found.batch}; " + ", ".join(f"{k} {v}" for k, v in found.environment.items())
        )
        return cls(timed, left_out, found.model, about)

    def suggest(self, recipes: Collection[str]) -> str | None:
        """Return what to try where one of `recipes` is no faster; None where all are."""
        ours = [one for one in self.points if one.row.recipe in recipes and one.row.recipe != PLAIN]
        slow = [point for point in ours if (point.speed or 0.0) <= 1]
        if not slow:
            return None
        names = ", ".join(f"{point.row.recipe} ({point.speed or 0.0:.2f}x)" for point in slow)
        if len(slow) < len(ours):
            return f"no faster here: {names}; try {ours[0].row.recipe} ({ours[0].speed:.2f}x)"
        return (
            f"no faster here: {names}; try another recipe or draft model (`mmspec bench --model "
            f"{self.model} --recipe all` ranks them), or decode without speculation"
        )

    def write(self, file: Path, plot: Path | None = None) -> None:
        """Write CSV or Markdown by extension; Markdown shows a plot in the same folder."""
        if file.suffix == ".csv":
            self.write_csv(file)
        else:
            image = plot.name if plot is not None and plot.parent == file.parent else None
            file.write_text(self.markdown(image), encoding="utf-8")

    def markdown(self, plot: str | None = None) -> str:
        """Return a page with the plot, the table, the settings, and what was skipped."""
        lines = [f"# Recipes on {self.model}, the fastest first", ""]
        lines += [f"![speed-up and acceptance length of each recipe]({plot})", ""] if plot else []
        lines += [f"| | {' | '.join(TITLES.values())} |", f"|{'---|' * (1 + len(TITLES))}"]
        for place, point in enumerate(self.points, 1):
            name = BASELINE_TITLES.get(point.row.recipe, point.row.recipe)
            cells = [str(place), *map(_format_cell, {**point.flat(), "recipe": name}.values())]
            lines.append(f"| {' | '.join(cells)} |")
        reasons: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            reasons.setdefault(why.replace(repr(name), "NAME"), []).append(f"`{name}`")
        lines += ["", *NOTES]
        lines += [f"Measured: {self.about}."] + (["", "Left out:", ""] if reasons else [])
        lines += [f"- {', '.join(names)}: {why}" for why, names in reasons.items()]
        return "\n".join(lines) + "\n"


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
