"""`mmspec doctor`: check whether models work together, or measure every class of a library."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict

import typer

from mmspec import registry, zoo
from mmspec.cli.models import check_source
from mmspec.cli.output import (
    console,
    print_error,
    print_json,
    print_table,
    show_progress,
    show_status,
    silence_libraries,
)
from mmspec.cli.placement import check_placement, find_weight_bytes, place
from mmspec.modality import Finding, Modality
from mmspec.models.footprint import format_bytes, free_bytes
from mmspec.models.placement import ANYWHERE
from mmspec.registry import ZOO


def run(
    target: str,
    drafter: str | None,
    modality: str | None,
    json: bool,
    placed: Mapping[str, str] | None = None,
) -> None:
    """Check a model, or a pair, without reading weights. Exit code 1 if it is refused."""
    owner, findings = examine(target, drafter, modality, json)
    findings.append(_examine_placement(placed or {}, owner, target, drafter))
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
        print_json(document)
    else:
        rows = [(f.check, f.target, f.drafter, f.verdict, f.remark) for f in findings]
        print_table(rows, "check", "target", "drafter", "verdict", "remark")
        if not refusals:
            console().print("\nthis works" if drafter is None else "\nthese two work together")
    for reason in refusals:
        print_error(reason)
    if refusals:
        raise typer.Exit(1)


def examine(
    target: str, drafter: str | None, modality: str | None, json: bool
) -> tuple[Modality, list[Finding]]:
    """The modality of a model and the findings on it. Raises ValueError for a missing model."""
    for name in (target, drafter):
        if name is not None:
            check_source(name)
    owner = registry.find_modality(target, modality)
    formatting = registry.formatting(owner)
    silence_libraries()
    with show_status(f"looking at {target}", json):
        small = None if drafter is None else _folder(drafter)
        return owner, formatting.examine(_folder(target), small)


def _examine_placement(
    placed: Mapping[str, str], owner: Modality, target: str, drafter: str | None
) -> Finding:
    """Whether the weights can be loaded as requested: memory of both models, and what is free."""
    names = [target] if drafter is None else [target, drafter]
    try:
        check_placement(placed, owner, target)
        models = place(placed, target, names[1:])
    except ValueError as error:
        return Finding("placement", None, None, "refused", str(error))
    sizes, places = [], []
    for name, keywords in zip(names, models, strict=False):
        one = keywords.get("placement", ANYWHERE)
        size, free = find_weight_bytes(name, one), free_bytes(one.torch_device)
        sizes.append("unknown" if size is None else format_bytes(size))
        if free is not None:
            places.append(f"{format_bytes(free)} free on {one.torch_device}")
    return Finding(
        "weights in memory",
        sizes[0],
        sizes[-1] if drafter else None,
        remark=", ".join(dict.fromkeys(places)),
    )


def survey(modality: str | None, json: bool) -> None:
    """Measure every class of the libraries, built small. Exit code 1 if anything is wrong.

    Without a modality all of them are measured.
    """
    silence_libraries()
    found, is_wrong = [], False
    with show_progress(json) as report, redirect_stdout(sys.stderr):  # some classes print
        for one in registry.surveys(modality):
            lines = []
            for line in one.survey():
                lines.append(line)
                report("classes", len(lines), line.total)
            found.append((one, lines))
            is_wrong = is_wrong or any(line.verdict == "wrong" for line in lines)
    if json:
        every = [line for _, lines in found for line in lines]
        print_json([{**asdict(line), "verdict": line.verdict} for line in every])
    else:
        for one, lines in found:
            typer.echo(one.markdown(lines))
    if is_wrong:
        raise typer.Exit(1)


def _folder(name: str) -> str:
    return str(zoo.path(name.removeprefix(ZOO))) if name.startswith(ZOO) else name
