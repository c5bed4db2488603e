"""Traces on the command line: `mmspec trace`, `mmspec generate --trace`, words as they come."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mmspec import recipes, registry
from mmspec.cli.models import LoadedModels, check_distinct, check_writable
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import console, print_json, print_pairs, show_status
from mmspec.draft import Round
from mmspec.errors import check_is_file
from mmspec.tracing.trace import ENDINGS as TRACE_FILES
from mmspec.tracing.trace import Trace
from mmspec.tracing.words import Words

ACCEPTED = "green underline"  # readable without colour
__all__ = ["TRACE_FILES", "find_processor", "make_page", "make_trace", "watch_words", "write_trace"]


def make_page(file: Path, out: Path | None, json: bool) -> None:
    """Read a JSONL trace and write its page."""
    check_is_file(file)
    if file.suffix.lower() == ".html":
        raise ValueError(
            f"{file} is a page; give the trace that `mmspec generate --trace FILE.jsonl` writes"
        )
    place = file.with_suffix(".html") if out is None else out
    check_writable("--out", place, (".html",))
    check_distinct({"FILE": file, "--out": place})
    trace = Trace.load(file)
    trace.save(place)
    header = trace.header
    document = {name: header[name] for name in ("model", "recipe", "exact", "modality")}
    document |= {"out": str(place), "rounds": len(trace.rounds), "notes": header["notes"]}
    if json:
        print_json(document)
    else:
        print_pairs([(name, value) for name, value in document.items() if value != []])


def make_trace(loaded: LoadedModels, prompt: str) -> Trace:
    """A trace of a request of the command line, with the words of its model."""
    return Trace(find_processor(loaded), prompt or None)


def write_trace(
    trace: Trace,
    place: Path,
    loaded: LoadedModels,
    request: Mapping[str, Any],
    compare: bool,
    options: ModelOptions,
) -> Path:
    """Write a trace; with `compare`, plain decoding is run once to be shown beside it."""
    owner = loaded.selection.owner
    if compare and recipes.find_misfit(owner.plain[0], owner) is None:
        plain = Trace()
        with show_status("tracing plain decoding", options.json):
            loaded.call(loaded.accelerate_plain(), {**request, "trace": plain}, options.seed)
        trace.race(plain)
    return trace.save(place)


def find_processor(loaded: LoadedModels) -> Any:
    """What decodes the tokens of a model; None where they are no text."""
    tracing = registry.tracing(loaded.selection.owner)
    return None if tracing is None else tracing.find_processor(loaded.formatter)


def watch_words(loaded: LoadedModels) -> WordPrinter | None:
    """Prints words as they are accepted; None where there is no text, or no terminal."""
    out = console()
    processor = find_processor(loaded) if out.is_terminal else None
    return None if processor is None else WordPrinter(out, Words(processor, skips_special=True))


class WordPrinter:
    """Prints the words of the first row as its rounds come: accepted draft tokens in colour."""

    def __init__(self, out: Console, words: Words) -> None:
        self.out, self.words = out, words
        self.latest: list[int] = []
        self.is_begun = False

    def __call__(self, round_: Round) -> None:
        new = [int(one) for one in round_.tokens[0]]
        line = Text()
        for place, word in enumerate(self.words.spell(new, self.latest)):
            line.append(word, style=ACCEPTED if place < round_.accepted[0] else "")
        self.latest = [*self.latest, *new][-8:]
        if not self.is_begun:
            line = line[len(line.plain) - len(line.plain.lstrip()) :]
        self.is_begun = self.is_begun or bool(line)
        self.out.print(line, end="", soft_wrap=True)

    def end(self) -> None:
        """End the line, and name what the colour means where there is one."""
        self.out.print()
        if self.out.is_terminal:
            about = Text.assemble(("accepted drafts", ACCEPTED), "; the rest is the target's")
            self.out.print(about)
