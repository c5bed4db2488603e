"""What `mmspec doctor --all` does: every class of the libraries, built small and measured."""

from __future__ import annotations

from dataclasses import asdict

import typer

from mmspec import registry
from mmspec.cli.inputs import quiet
from mmspec.cli.output import emit, progress


def run(json: bool) -> None:
    """Print a table of what works, in Markdown. Exit code 1 where anything gave a wrong token."""
    quiet()
    found, wrong = [], False
    with progress(json) as show:
        for one in registry.surveys():
            lines = []
            for line in one.survey():
                lines.append(line)
                show("classes", len(lines), line.total)
            found.append((one, lines))
            wrong = wrong or any(line.verdict == "wrong" for line in lines)
    if json:
        emit([{**asdict(line), "verdict": line.verdict} for _, lines in found for line in lines])
    else:
        for one, lines in found:
            typer.echo(one.markdown(lines))
    if wrong:
        raise typer.Exit(1)
