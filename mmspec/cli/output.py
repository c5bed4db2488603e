"""What a command prints: text and tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def console() -> Console:
    """Standard output; made when asked for, so that redirections count."""
    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False)


def complain(message: str) -> None:
    """One red line on stderr."""
    line = Text(f"error: {message}", style="bold red", no_wrap=True, overflow="ignore")
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def line(error: Exception) -> tuple[str, int]:
    """What happened, in one line, and the exit code."""
    if isinstance(error, typer.TyperException):  # a wrong option or argument
        message = " ".join(error.format_message().split())
        context = vars(error).get("ctx")
        if message:
            message = f"{message.rstrip('.')}; see `mmspec {_command(context)}--help`"
        return message, error.exit_code
    message = " ".join(str(error).split())
    if not isinstance(error, ValueError | TypeError | OSError):
        message = f"{type(error).__name__}: {message} (MMSPEC_DEBUG=1 shows where)"
    return message or type(error).__name__, 1


def _command(context: Any | None) -> str:
    """The commands that led to where an error is, without the program's own name."""
    names = []
    while context is not None and context.parent is not None:
        names.append(f"{context.info_name} ")
        context = context.parent
    return "".join(reversed(names))


def emit(document: Any) -> None:
    """The JSON document of a command."""
    typer.echo(json.dumps(document, indent=2, default=str))


def table(rows: Sequence[Sequence[Any]], *titles: str, heading: str | None = None) -> None:
    """Print rows; numbers are written short."""
    made = Table(title=heading, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for title in titles:
        made.add_column(title, overflow="fold")
    for row in rows:
        made.add_row(*(Text(short(value)) for value in row))
    _wide().print(made)


def pairs(rows: Sequence[tuple[str, Any]]) -> None:
    """Print names and values below each other."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, Text(short(value)))
    _wide().print(made)


def _wide() -> Console:
    """Standard output; as wide as need be where no terminal limits it."""
    out = console()
    return out if out.is_terminal else Console(width=max(out.width, 220), highlight=False)


def short(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.2f}"
    if isinstance(value, list | tuple):
        return ", ".join(short(inner) for inner in value)
    return str(value)


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def times(value: float, spread: Sequence[float] | None = None) -> str:
    """A ratio, with its extremes where they are known."""
    shown = f"{value:.2f}x"
    return shown if spread is None else f"{shown} ({spread[0]:.2f} to {spread[1]:.2f})"


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar per stage on stderr; none without a terminal, nor beside JSON."""
    terminal = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    hidden = quiet or not terminal.is_terminal
    with Progress(*columns, console=terminal, transient=True, disable=hidden) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int, note: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, note=note)
            bars.update(tasks[stage], completed=done, total=total, note=note)

        yield report


@contextmanager
def working(what: str, quiet: bool) -> Iterator[None]:
    """A line on stderr while something is under way; none without a terminal, nor beside JSON."""
    terminal = Console(stderr=True)
    if quiet or not terminal.is_terminal:
        yield
    else:
        with terminal.status(what):
            yield
