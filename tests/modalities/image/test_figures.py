"""The figures that the README gives of picture tokens are those of the guide's table."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]


def measured(recipe: str) -> tuple[float, float]:
    """How many times fewer calls, and how many times as fast as plain decoding."""
    rows = (line.split("|") for line in (ROOT / "docs/images.md").read_text().splitlines())
    found = [row for row in rows if len(row) > 4 and row[1].strip() == recipe]
    fewer, over = found[0][3].split()[0], found[0][4].split()[0]
    return float(fewer), float(over)


def test_the_readme_and_the_guide_say_the_same() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    fewer, over = measured("`mc-sjd-gumbel`")
    assert f"(`mc-sjd-gumbel`): {fewer:.1f} times fewer target calls and {over:.1f} times" in readme
    fewer, over = measured("`gsd`, `suffix=couple length=31 size=50 distance=inf`")
    assert f"lossy (`gsd`) up to {fewer:.1f} and {over:.1f} times" in readme
