"""The page of results: Markdown, CSV and JSON of the same lines, and what moved since a run."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from mmspec.bench.results.categories import CategoryLine, CategoryTable
from mmspec.bench.results.lines import DIFFERS, Line
from mmspec.bench.results.systems import SOURCE
from mmspec.errors import parse_json

T = TypeVar("T")
TITLES = (
    *("rank", "system", "output", "drafter, trained", "it sees", "acceptance length"),
    *("fewer calls", "speed", "least", "most", "quality", "paper", "why"),
)
ABOUT = f"""\
A row for each of the 47 systems of the multimodal survey, sorted by speed within its section, and
for the baselines (in italics). These models are tiny and know one procedural world
([bundled models](reference/bundled-models.md)), so the figures compare the methods on them, and do
not predict a large model: measure your own pair ([benchmarks](reference/benchmarks.md)).

Baselines that begin with *transformers* or *diffusers* are the methods of those libraries; *plain*
is decoding without drafts here, *SYSTEM: plain* and *SYSTEM: pipeline* the same in as many calls as
that lossy system makes, and the other baselines are [recipes](recipes.md).

*Speed* is end to end over the library's own call (`generate()`, the pipeline), or over plain
decoding where there is none, in the same minutes: the median of the repeats with the least and the
most. Rows whose spreads overlap share ranks. *Fewer calls* are target calls of plain decoding over
those of the method, with the standard error over requests. *Quality* is followed by its standard
error, and by that of plain decoding on the same requests. *Paper* is the figure that the paper
reports (*{SOURCE}*), on
other models and machines; *why* says in a word why ours is another:
"""


@dataclass(frozen=True)
class Section:
    """A section of the page, sorted."""

    name: str
    title: str
    model: str
    about: str  # how it was measured
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Move:
    """A line measured twice whose spreads do not overlap."""

    section: str
    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Page:
    """All that one command measured."""

    sections: tuple[Section, ...]
    command: str
    categories: tuple[CategoryTable, ...] = ()  # of the targets of some sections
    note: str = ""  # what the reader must know of the measurement

    @property
    def lines(self) -> list[Line]:
        return [line for section in self.sections for line in section.lines]

    def write(self, file: Path, before: Page | None, plots: Mapping[str, str]) -> None:
        """Write the page, and the lines as .csv and .json beside it; `plots` are by section."""
        moves = None if before is None else find_moves(before, self)
        file.write_text(self.markdown(moves, plots), encoding="utf-8")
        write_csv(self.lines, file.with_suffix(".csv"))
        text = json.dumps(asdict(self), indent=1, default=str) + "\n"
        file.with_suffix(".json").write_text(text, encoding="utf-8")

    def markdown(self, moves: Sequence[Move] | None, plots: Mapping[str, str]) -> str:
        """The page; `moves`: since another run."""
        text = ["# Results", "", ABOUT]
        text += [f"- *{word}*: {why}" for word, why in DIFFERS.items()]
        text += ["", "Made by", "", "```bash", self.command, "```", ""]
        text += [self.note, ""] if self.note else []
        for section in self.sections:
            text += [*_section(section, plots.get(section.name)), ""]
        for table in self.categories:
            text += [*table.markdown(), ""]
        text += [] if moves is None else [*_moves(moves), ""]
        return "\n".join(text)


def write_csv(lines: Sequence[Line], file: Path) -> None:
    """Write one row per line."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [one.name for one in fields(Line)])
        writer.writeheader()
        writer.writerows(map(asdict, lines))


def find_moves(before: Page, page: Page) -> list[Move]:
    """Lines whose spread of speed is apart from that of another run."""
    known, found = _by_name(before), []
    for line in page.lines:
        old = known.get((line.section, line.name))
        if old is None or not (_is_timed(old) and _is_timed(line)):
            continue
        if _numbers(old)[2] < _numbers(line)[1] or _numbers(line)[2] < _numbers(old)[1]:
            found.append(Move(line.section, line.name, _span(old), _span(line)))
    return found


def count_repeated(before: Page, page: Page) -> int:
    """How many timed lines two runs share."""
    known = {name for name, line in _by_name(before).items() if _is_timed(line)}
    return sum(_is_timed(one) and (one.section, one.name) in known for one in page.lines)


def keep_sections(before: Page, page: Page, measured: Collection[str]) -> Page:
    """The page with the sections of an earlier run where they were not `measured` again.

    It lists the commands of both, each once, and has the note of the earlier one if it has none.
    Raises ValueError if a section is on neither.
    """
    known = {one.name: one for one in before.sections}
    missing = [one.name for one in page.sections if one.name not in {*measured, *known}]
    if missing:
        raise ValueError(
            f"the page to keep lacks the section {missing[0]}; measure it too (--modality)"
        )
    sections = tuple(one if one.name in measured else known[one.name] for one in page.sections)
    fresh = {one.model for one in sections if one.name in measured}
    old = [one for one in before.categories if one.model not in fresh]
    tables = [*old, *(one for one in page.categories if one.model in fresh)]
    places = [one.model for one in sections]
    tables.sort(key=lambda one: places.index(one.model) if one.model in places else len(places))
    earlier = [one for one in before.command.splitlines() if one != page.command]
    command = "\n".join((*dict.fromkeys(earlier), page.command))
    return Page(sections, command, tuple(tables), page.note or before.note)


def read_page(file: Path) -> Page:
    """Read the JSON file of a page. Raises ValueError for another file."""
    data = parse_json(file.read_bytes())
    if not isinstance(data, dict) or "sections" not in data:
        raise ValueError(
            f"{file} is no page of results; give the .json that `mmspec bench results` wrote"
        )
    tables = data.get("categories") or ()
    tables = [tables] if isinstance(tables, dict) else tables  # of older pages: one
    return Page(
        tuple(_read(Section, one, lines=_read_lines(Line, one)) for one in data["sections"]),
        data["command"],
        tuple(_read(CategoryTable, one, lines=_read_lines(CategoryLine, one)) for one in tables),
        data.get("note", ""),
    )


def _read(kind: type[T], data: Mapping[str, Any], **given: Any) -> T:
    """A dataclass from plain data; columns of other versions are dropped."""
    known = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{**{name: value for name, value in data.items() if name in known}, **given})


def _read_lines(kind: type[T], data: Mapping[str, Any]) -> tuple[T, ...]:
    return tuple(_read(kind, one) for one in data["lines"])


def _by_name(page: Page) -> dict[tuple[str, str], Line]:
    return {(one.section, one.name): one for one in page.lines}


def _is_timed(line: Line) -> bool:
    return line.speed is not None


def _numbers(line: Line) -> tuple[float, float, float]:
    """Speed, least and most of a timed line."""
    assert line.speed is not None
    assert line.least is not None
    assert line.most is not None
    return line.speed, line.least, line.most


def _section(section: Section, plot: str | None) -> list[str]:
    text = [f"## {section.title}", "", f"Target `{section.model}`; {section.about}.", ""]
    text += [f"![speed with its spread]({plot})", ""] if plot else []
    text += [f"| {' | '.join(TITLES)} |", f"|{'---|' * len(TITLES)}"]
    text += [f"| {' | '.join(_cells(line, section.model))} |" for line in section.lines]
    notes = [f"- {line.name}: {_clean(line.note)}" for line in section.lines if line.note]
    return [*text, *([""] if notes else []), *notes]


def _cells(line: Line, model: str) -> list[str]:
    name = line.name if line.headline else f"*{line.name}*"
    name += f", {line.model}" if line.headline and line.model != model else ""
    drafter = line.drafter or ("none" if line.recipe and line.speed is not None else "")
    trained = f"{drafter}; {line.trained}" if line.trained else drafter
    fewer = _number(line.fewer_calls)
    if line.fewer_calls is not None and line.fewer_calls_error:
        fewer += f" ± {line.fewer_calls_error:.2f}"
    paper = "; ".join(filter(None, (line.headline, line.headline_is)))
    return [
        line.rank or "",
        name,
        line.promise or "",
        _clean(trained),
        line.saw or "",
        _number(line.acceptance_length),
        fewer,
        _number(line.speed, "x"),
        _number(line.least),
        _number(line.most),
        _quality(line),
        paper,
        line.differs or ("not run" if line.speed is None and line.value is None else ""),
    ]


def _quality(line: Line) -> str:
    if line.value is None:
        return ""
    text = f"{line.quality} {line.value:.3f}"
    text += "" if line.error is None else f" ± {line.error:.3f}"
    text += "" if line.plain_value is None else f" (plain {line.plain_value:.3f})"
    if line.second_value is not None:
        text += f", {line.second_quality} {line.second_value:.1f}"
    return text


def _moves(moves: Sequence[Move]) -> list[str]:
    text = ["## What moved when it was run again", ""]
    if not moves:
        return [*text, "No row by more than its spread."]
    text += ["Rows whose spreads of both runs do not overlap:", ""]
    text += ["| section | row | before | now |", "|---|---|---|---|"]
    return [
        *text,
        *(f"| {one.section} | {one.name} | {one.before} | {one.after} |" for one in moves),
    ]


def _span(line: Line) -> str:
    speed, least, most = _numbers(line)
    return f"{speed:.2f}x ({least:.2f} to {most:.2f})"


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}"


def _clean(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "/")
