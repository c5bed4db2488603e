"""What results have in common: they become plain data, and their points a table."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any


class Report:
    """A dataclass of plain values."""

    def to_dict(self: Any) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


class PointTable(Report):
    """A report whose `points` are lines of a table, by their `flat()`."""

    def write_csv(self: Any, file: Path) -> None:
        """One line per point."""
        rows = [point.flat() for point in self.points]
        columns = dict.fromkeys(name for row in rows for name in row)
        with file.open("w", newline="") as opened:
            lines = csv.DictWriter(opened, list(columns))
            lines.writeheader()
            lines.writerows(rows)
