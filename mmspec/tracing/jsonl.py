"""The file format of traces: JSON lines, a header and one line per round (docs/trace.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT, VERSION = "mmspec-trace", 1
Json = dict[str, Any]
_HEADER = {
    **{"modality": str, "decodes": str, "model": str, "recipe": str, "exact": bool, "tokens": str},
    **{"settings": dict, "views": dict, "notes": list, "rounds": int, "batch": int},
}
_PLAIN = {"clock": list, "calls": int, "is_same": bool}
_ROUND = {"round": int, "part": int, "calls": int, "seconds": dict, "rows": list}
_ROW = {"tokens": list, "accepted": int, "draft": list, "parents": list, "path": list}


def write_jsonl(path: Path, header: Mapping[str, Any], rounds: Iterable[Mapping[str, Any]]) -> None:
    """Write a header and rounds, a line each."""
    with path.open("w", encoding="utf-8") as file:
        for line in (header, *rounds):
            file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_jsonl(path: Path) -> tuple[Json, list[Json]]:
    """The header and the rounds of a file; notes of what is missing are added to the header.

    A file that was cut is read up to the cut. Raises ValueError, with the line, for a file that is
    no trace, for one of another version, and for a damaged line before the last one.
    """
    lines = _read_lines(path)
    header = _parse(path, 1, lines[0]) if lines else None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a trace: its first line is not a header of the format {FORMAT}; give a "
            "file that Trace.save or `mmspec generate --trace` wrote"
        )
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path} is a trace of version {header.get('version')}, and this mmspec reads version "
            f"{VERSION}; read it with the mmspec that wrote it ({header.get('mmspec')})"
        )
    _check_fields(header, _HEADER, f"{path}, line 1")
    if header.get("plain") is not None:
        _check_fields(header["plain"], _PLAIN, f"{path}, line 1, plain")
    rounds = []
    for number, line in enumerate(lines[1:], 2):
        found = _parse(path, number, line, is_last=number == len(lines))
        if found is not None:
            check_round(found, f"{path}, line {number}", header)
            rounds.append(found)
    expected, notes = header.get("rounds"), list(header.get("notes", ()))
    if len(rounds) != expected:
        notes.append(f"The file was cut: it holds {len(rounds)} of {expected} rounds.")
    return {**header, "notes": notes}, rounds


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="strict").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file ({error.reason}); give a trace") from error


def _parse(path: Path, number: int, line: str, is_last: bool = False) -> Any:
    """One line; None for the last one of a file that was cut within it."""
    try:
        return json.loads(line)
    except ValueError as error:
        if is_last or number == 1:
            return None
        raise ValueError(
            f"{path}, line {number} is damaged ({error}); copy the file again"
        ) from error


def check_round(found: Any, where: str, header: Mapping[str, Any]) -> None:
    """Refuse what is no round. Raises ValueError."""
    _check_fields(found, _ROUND, where)
    if len(found["rows"]) != header.get("batch"):
        raise ValueError(
            f"{where} has {len(found['rows'])} rows and the header names a batch of "
            f"{header.get('batch')}; copy the file again"
        )
    for row in found["rows"]:
        _check_fields(row, _ROW, where)
        _check_tree(row, where)


def _check_fields(found: Any, fields: Mapping[str, type], where: str) -> None:
    for name, kind in fields.items():
        if not isinstance(found, dict) or not isinstance(found.get(name), kind):
            raise ValueError(f"{where} has no {name} of type {kind.__name__}; copy the file again")


def _check_tree(row: Mapping[str, Any], where: str) -> None:
    """Refuse nodes that are not there, and lists of other lengths than the draft."""
    nodes = len(row["draft"])
    parents, path = row["parents"], row["path"]
    is_tree = len(parents) == nodes and all(
        isinstance(parent, int) and -1 <= parent < node for node, parent in enumerate(parents)
    )
    if not is_tree or not all(isinstance(node, int) and 0 <= node < nodes for node in path):
        raise ValueError(f"{where} has parents or a path that are no tree of its draft")
    sizes: dict[str, Sequence[Any]] = {name: row.get(name, ()) for name in ("p", "q", "rank")}
    for name, values in {**sizes, "draft_text": row.get("draft_text", ())}.items():
        if name in row and (not isinstance(values, list) or len(values) != nodes):
            raise ValueError(f"{where} has {name} for another number of tokens than the draft")
    if "text" in row and len(row["text"]) != len(row["tokens"]):
        raise ValueError(f"{where} has text for another number of tokens than it accepted")
