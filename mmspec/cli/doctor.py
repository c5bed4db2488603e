"""What `mmspec doctor` does: do these two models work together?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from mmspec import registry, zoo
from mmspec.cli.choosing import check_source
from mmspec.cli.inputs import quiet
from mmspec.cli.output import complain, console, emit, table, working
from mmspec.registry import ZOO


def run(target: str, drafter: str | None, modality: str | None, json: bool) -> None:
    """Look at a model, or a pair, without reading weights. Exit code 1 if it is refused."""
    for name in (target, drafter):
        if name is not None:
            check_source(name)
    owner = registry.find_modality(target, modality)
    formatting = registry.formatting(owner)
    for name in (target, drafter):
        if name is not None and Path(name).is_dir() and not any(Path(name).glob("*.json")):
            raise ValueError(f"{name} holds no model; give a folder that save_pretrained wrote")
    quiet()
    with working(f"looking at {target}", json):
        small = None if drafter is None else _folder(drafter)
        findings = formatting.examine(_folder(target), small)
    refusals = [finding.remark for finding in findings if finding.verdict == "refused"]
    if json:
        document = {
            "target": target,
            "drafter": drafter,
            "modality": owner.name,
            "refused": bool(refusals),
            "reasons": refusals,
            "findings": [asdict(finding) for finding in findings],
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


def _folder(name: str) -> str:
    return str(zoo.path(name.removeprefix(ZOO))) if name.startswith(ZOO) else name
