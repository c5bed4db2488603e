"""Output of commands: text and tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

READABLE = 24  # characters that a column of prose needs at least
LONGEST_NAME = 32  # a first column of longer cells holds prose, too

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def console() -> Console:
    """Standard output; made at each call, so that redirections are respected."""
    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False)


def print_error(message: str) -> None:
    """Print one red line on stderr."""
    line = Text(f"error: {message}", style="bold red", no_wrap=True, overflow="ignore")
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)


def format_error(error: Exception) -> tuple[str, int]:
    """An error as one line, and the exit code."""
    if isinstance(error, typer.TyperException):  # a wrong option or argument
        message = " ".join(error.format_message().split())
        context = vars(error).get("ctx")
        if message:
            message = f"{message.rstrip('.')}; see `mmspec {_command_path(context)}--help`"
        return message, error.exit_code
    message = " ".join(str(error).split())
    if not isinstance(error, ValueError | TypeError | OSError):
        message = f"{type(error).__name__}: {message} (MMSPEC_DEBUG=1 shows where)"
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}; give another path"
    return message or type(error).__name__, 1


def _command_path(context: Any | None) -> str:
    """The commands up to the one that failed, without the program's name."""
    names = []
    while context is not None and context.parent is not None:
        names.append(f"{context.info_name} ")
        context = context.parent
    return "".join(reversed(names))


def print_json(document: Any) -> None:
    """Print the JSON document of a command."""
    typer.echo(json.dumps(document, indent=2, default=str))


def print_table(rows: Sequence[Sequence[Any]], *titles: str, heading: str | None = None) -> None:
    """Print rows; numbers are rounded. A terminal that is too narrow gets a record per row."""
    out = _wide_console()
    cells = [[format_value(value) for value in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(titles, *cells, strict=True)]
    is_named = widths[0] <= LONGEST_NAME
    least = [widths[0] if is_named else READABLE, *(min(width, READABLE) for width in widths[1:])]
    if out.is_terminal and sum(least) + 2 * (len(least) - 1) > out.width:
        _print_records(out, cells, titles, widths, heading)
        return
    made = Table(title=heading, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for index, title in enumerate(titles):
        made.add_column(title, overflow="fold", no_wrap=index == 0 and is_named)
    for row in cells:
        made.add_row(*map(Text, row))
    out.print(made)


def _print_records(
    out: Console,
    cells: Sequence[Sequence[str]],
    titles: Sequence[str],
    widths: Sequence[int],
    heading: str | None,
) -> None:
    """Print a row as the columns that fit on one line, and each other one on a line below.

    name       modality  kind
    diffusion  diffusion target
        description: a diffusion transformer of 10 layers
    """
    first, free = {0}, out.width - widths[0]
    for index in sorted(range(1, len(widths)), key=lambda index: widths[index]):
        if widths[index] <= READABLE and widths[index] + 2 <= free:
            first.add(index)
            free -= widths[index] + 2
    if heading is not None:
        out.print(Text(heading, style="italic"))
    for number, row in enumerate([titles, *cells]):
        row = [value.replace("\n", "; ") for value in row]
        line = "  ".join(row[index].ljust(widths[index]) for index in sorted(first))
        out.print(Text(line.rstrip(), style="bold" if number == 0 else ""))
        for index, value in enumerate(row):
            if number and index not in first and value != "-":
                out.print(Padding.indent(Text(f"{titles[index]}: {value}"), 4))


def print_pairs(rows: Sequence[tuple[str, Any]]) -> None:
    """Print names and values below each other."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, Text(format_value(value)))
    _wide_console().print(made)


def show_report(found: Mapping[str, Any], json: bool) -> None:
    """Print the report of a recipe, as JSON or for people."""
    if json:
        print_json(found)
    else:
        console().print(f"[bold]{found['recipe']}[/bold]")
        print_pairs([(name, value) for name, value in found.items() if name != "recipe"])


def _wide_console() -> Console:
    """Standard output; wide where it is no terminal."""
    out = console()
    return out if out.is_terminal else Console(width=max(out.width, 220), highlight=False)


def format_value(value: Any) -> str:
    """A value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.2f}"
    if isinstance(value, list | tuple):
        return ", ".join(format_value(inner) for inner in value)
    return str(value)


def format_percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def format_ratio(value: float, spread: Sequence[float] | None = None) -> str:
    """A ratio, with its extremes if they are known."""
    shown = f"{value:.2f}x"
    return shown if spread is None else f"{shown} ({spread[0]:.2f} to {spread[1]:.2f})"


def print_note(text: str) -> None:
    """Print a line below a table."""
    console().print(f"\n{text}", style="dim")


@contextmanager
def show_progress(quiet: bool) -> Iterator[Callable[..., None]]:
    """Show a bar per stage on stderr; none without a terminal, or with --json."""
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
def show_status(text: str, quiet: bool) -> Iterator[None]:
    """Show a line on stderr meanwhile; none without a terminal, or with --json."""
    terminal = Console(stderr=True)
    if quiet or not terminal.is_terminal:
        yield
    else:
        with terminal.status(text):
            yield


def silence_libraries() -> None:
    """Turn off progress bars and remarks of transformers, and of diffusers if it is loaded."""
    for library in ("transformers", "diffusers"):
        if library == "transformers" or library in sys.modules:
            logging = import_module(f"{library}.utils.logging")
            if os.environ.get("MMSPEC_DEBUG") != "1":
                logging.set_verbosity_error()
            logging.disable_progress_bar()
