"""Tables of the command line on terminals of different widths."""

from __future__ import annotations

from functools import partial

import pytest
from rich.console import Console

from mmspec.cli import main, output
from mmspec.cli.recipes import PROPOSALS
from mmspec.draft import Kind

TITLES = ("recipe", "output", "idea")
IDEA = "a small model drafts, and the target verifies all of its tokens in one forward pass"
ROWS = (("eagle-3", "exact", IDEA), ("accelerated-diffusion-carried", "lossy", None))


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> list[str]:
    """The lines of the table on a terminal of this width."""
    terminal = partial(Console, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(output, "console", terminal)
    output.print_table(ROWS, *TITLES)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_no_name_is_broken_and_no_line_is_too_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    lines = printed(capsys, monkeypatch, width)
    assert max(map(len, lines)) <= width
    for name, verdict, _ in ROWS:
        assert any(line.startswith(name) and verdict in line for line in lines)
    assert IDEA in " ".join(" ".join(lines).split())


def test_a_narrow_terminal_has_prose_below_its_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed(capsys, monkeypatch, 60)[:5] == [
        "recipe                         output",
        "eagle-3                        exact",
        "    idea: a small model drafts, and the target verifies all",
        "    of its tokens in one forward pass",
        "accelerated-diffusion-carried  lossy",
    ]


def test_a_recipe_is_shown_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(PROPOSALS) == {kind.name for kind in Kind}
    assert main(["show", "eagle-3"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("verifies")]
    assert "samples with the target's noise, deterministic proposals" in line
