"""A race as a ranking: one line per recipe, the fastest first, as CSV, as Markdown or as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.bench.compare import Comparison
from mmspec.bench.report import PointTable
from mmspec.bench.row import Row

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
    "Speed-ups are over the first baseline, medians with the least and the most; the error is of",
    "fewer calls, a standard error over requests.",
)


@dataclass(frozen=True)
class RankedRecipe:
    """One contestant of a race."""

    row: Row

    @property
    def speed(self) -> float | None:
        """How many times faster end to end than the first baseline; than plain decoding without."""
        over = self.row.speedup_end_to_end
        return self.row.speedup_over_plain if over is None else over

    def flat(self) -> dict[str, Any]:
        """One line of a table."""
        one, none = self.row, (None, None)
        name = "speedup_over_plain" if one.speedup_end_to_end is None else "speedup_end_to_end"
        least, most = one.spread.get(name, none)
        return {
            "recipe": one.recipe,
            "speed": self.speed,
            "least": least,
            "most": most,
            "acceptance_length": one.mean_acceptance_length,
            "fewer_calls": one.fewer_calls,
            "fewer_calls_error": one.fewer_calls_error,
            "output": "exact" if one.exact else "lossy",
            "drafter": one.drafter,
        }


@dataclass(frozen=True)
class Ranking(PointTable):
    """Contestants of one race, the fastest first, and what took no part."""

    points: list[RankedRecipe]
    left_out: Mapping[str, str]  # why
    model: str
    about: str  # how it was measured

    @classmethod
    def of(cls, found: Comparison, left_out: Mapping[str, str]) -> Ranking:
        """The recipes of a race, plain decoding, the library's own ways, and controls."""
        ran = (*found.rows, *found.baselines, *found.controls)
        lines = [RankedRecipe(row) for row in ran if row.skipped is None]
        timed = [line for line in lines if line.speed is not None]
        timed.sort(key=lambda line: -(line.speed or 0.0))
        asked = ", ".join(f"{name} {value}" for name, value in found.settings.items())
        about = (
            f"{asked}; {found.requests} requests, {found.repeats} repeats, batch "
            f"{found.batch}; " + ", ".join(f"{k} {v}" for k, v in found.environment.items())
        )
        return cls(timed, left_out, found.model, about)

    def write(self, file: Path, plot: Path | None = None) -> None:
        """As CSV, or as Markdown by the ending of the file; a plot that lies beside it is shown."""
        if file.suffix == ".csv":
            self.write_csv(file)
        else:
            shown = plot.name if plot is not None and plot.parent == file.parent else None
            file.write_text(self.markdown(shown), encoding="utf-8")

    def markdown(self, plot: str | None = None) -> str:
        """A page: the plot, a table, how it was measured, and what was left out."""
        lines = [f"# Recipes on {self.model}, the fastest first", ""]
        lines += [f"![speed over acceptance length]({plot})", ""] if plot else []
        lines += [f"| | {' | '.join(TITLES.values())} |", f"|{'---|' * (1 + len(TITLES))}"]
        for place, point in enumerate(self.points, 1):
            cells = [str(place), *map(_shown, point.flat().values())]
            lines.append(f"| {' | '.join(cells)} |")
        whys: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            whys.setdefault(why.replace(repr(name), "NAME"), []).append(f"`{name}`")
        lines += ["", *NOTES]
        lines += [f"Measured: {self.about}."] + (["", "Left out:", ""] if whys else [])
        lines += [f"- {', '.join(names)}: {why}" for why, names in whys.items()]
        return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)
