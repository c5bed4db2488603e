"""The figures of image tokens in the text of the measurements are those of the table."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILE = ROOT / "docs/measurements/images.md"
COUPLED_GROUPS = "`gsd`, `suffix=couple length=31 size=50 distance=inf`"


def read_row(recipe: str) -> tuple[Decimal, Decimal, Decimal]:
    """Times fewer target calls, speed-up over plain decoding, and codes of ink per round."""
    rows = (line.split("|") for line in FILE.read_text().splitlines())
    (row,) = (row for row in rows if len(row) > 7 and row[1].strip() == recipe)
    return Decimal(row[3].split()[0]), Decimal(row[4].split()[0]), Decimal(row[7].strip())


def format_range(values: list[Decimal]) -> str:
    ends = (one.quantize(Decimal("0.1"), ROUND_HALF_UP) for one in (min(values), max(values)))
    return " to ".join(map(str, ends))


def test_text_and_table_agree() -> None:
    text = " ".join(FILE.read_text().split())
    fewer, over, ink = zip(
        *map(read_row, ("`mc-sjd`", "`mc-sjd-gumbel`", "`sjd-pac`")), strict=True
    )
    saved = f"`mc-sjd`, `mc-sjd-gumbel` and `sjd-pac` need {format_range([*fewer])} times fewer"
    assert f"{saved} target calls" in text
    first_two = format_range([*over[:2]])
    assert f"the first two are {first_two} times as fast as plain decoding" in text
    assert f"they commit {format_range([*ink])} codes of it" in text
    ratio = read_row(COUPLED_GROUPS)[0] / read_row("`mc-sjd-gumbel`")[0]
    assert f"{ratio:.2f} times fewer than `mc-sjd-gumbel`" in text
