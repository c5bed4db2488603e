"""`mmspec doctor`: do these two models work together?"""

from __future__ import annotations

from typing import Annotated

import typer

from mmspec.cli.inputs import present, quiet
from mmspec.cli.output import Json, complain, console, emit, table


def doctor(
    target: Annotated[str, typer.Argument(help="A folder, a hub name or zoo:NAME.")],
    drafter: Annotated[str | None, typer.Argument(help="A draft model for it.")] = None,
    json: Json = False,
) -> None:
    """Check a model, or a pair, before loading any weights. Exit code 1 if it is refused."""
    from mmspec.cli.checks import examine

    quiet()
    for name in (target, drafter):
        if name is not None:
            present(name)
    findings = examine(target, drafter)
    refusals = [finding.remark for finding in findings if finding.verdict == "refused"]
    if json:
        document = {
            "target": target,
            "drafter": drafter,
            "refused": bool(refusals),
            "reasons": refusals,
            "findings": [finding.to_dict() for finding in findings],
        }
        emit(document)
    else:
        rows = [(f.check, f.target, f.drafter, f.verdict, f.remark) for f in findings]
        table(rows, "check", "target", "drafter", "verdict", "remark")
        if not refusals:
            console().print("\nthis works" if drafter is None else "\nthese two work together")
    for reason in refusals:
        complain(reason)
    if refusals:
        raise typer.Exit(1)
