"""`mmspec compressors`: what thins pictures for a drafter, and what each needs."""

from __future__ import annotations

from mmspec.cli.output import emit, table
from mmspec.compressors import COMPRESSORS, about


def run(json: bool) -> None:
    """One line per compressor."""
    listed = [about(name) for name in COMPRESSORS]
    if json:
        emit(listed)
        return
    lines = [
        [
            one["name"],
            [f"{name}={value}" for name, value in one["parameters"].items()] or None,
            [*one["needs"], *(["weights"] if one["trained"] else [])] or None,
            "varies" if one["kept of 576"] is None else one["kept of 576"],
            one["places"],
            one["summary"],
        ]
        for one in listed
    ]
    table(lines, "compressor", "parameters", "needs", "kept of 24 x 24", "position", "idea")
