"""`mmspec bench results`: the page of all systems of the survey, measured one after the other."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any

import typer

from mmspec import bench, recipes
from mmspec.accelerated import Accelerated
from mmspec.bench.plots import plot_section
from mmspec.bench.results import categories
from mmspec.bench.results.categories import CategoryTable
from mmspec.bench.results.lines import Line, lines_of, rank
from mmspec.bench.results.page import (
    Page,
    Section,
    count_repeated,
    find_moves,
    keep_sections,
    read_page,
)
from mmspec.bench.results.records import Effort, Record, Store, describe
from mmspec.bench.results.systems import Job, System, plan, read_groups, select
from mmspec.cli import models
from mmspec.cli.bench import AUTO, workload
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import console, print_error, print_json, print_table, show_progress
from mmspec.errors import first_line
from mmspec.recipe import TREE

PLOT = ".svg"


def run(
    modality: list[str] | None,
    only: list[str] | None,
    vlm_model: str | None,
    effort_of_all: Mapping[str, int],
    work: Path,
    out: Path,
    compare: Path | None,
    keep: Path | None,
    note: str,
    dry_run: bool,
    json: bool,
) -> None:
    """Measure what the folder `work` lacks, then write the page of all that it has.

    Sections that were not measured now are those of the page `keep`.
    """
    if vlm_model is not None:
        models.check_source(vlm_model)
    effort, jobs = Effort(**effort_of_all), plan(vlm_model)
    wanted = select(jobs, modality, only)
    store = Store(work)
    if dry_run:
        _show_plan(wanted, store, effort, json)
        return
    models.check_writable("--out", out, (".md",))
    before = None if compare is None else read_page(compare)
    kept = None if keep is None else _read_kept(keep, modality, only)
    models.check_files(None, out.with_suffix(PLOT))
    models.set_threads(effort.threads)
    measure_all(wanted, store, effort, json)
    lines = [line for job in jobs for line in _lines(job, store, effort)]
    measured = _groups(wanted) if only is None else set()
    tables = _categories(jobs, lines, store, effort, json, measured)
    sections = _sections(jobs, lines, store, effort)
    command = _command(effort, vlm_model, out, modality if kept else None)
    page = Page(sections, command, tables, note)
    if kept is not None:
        page = keep_sections(kept, page, _groups(wanted))
    page.write(out, before, _plot(page, out))
    _report(page, before, out, json)


def _read_kept(keep: Path, modality: list[str] | None, only: list[str] | None) -> Page:
    """The page whose sections are kept. Raises ValueError where whole sections are not chosen."""
    if not modality or only:
        raise ValueError(
            "--keep takes whole sections from an earlier page; name those to measure again with "
            "--modality, without --only"
        )
    return read_page(keep)


def measure_all(jobs: Sequence[Job], store: Store, effort: Effort, json: bool) -> None:
    """Measure the jobs that have no record. Raises KeyboardInterrupt with what was kept."""
    for number, job in enumerate(jobs, 1):
        settings = describe(job, effort)
        if store.find(settings) is not None:
            continue
        if not json:
            typer.echo(f"{number}/{len(jobs)} {job.group.title}: {job.name}", err=True)
        try:
            store.write(measure(job, settings, effort, json))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted at {job.name}; the rows before are in {store.folder}, and the same "
                "command goes on from there"
            ) from None
        except Exception as error:  # of one row; the page has the reason, and the next run retries
            store.write_failure(settings, str(error) or type(error).__name__)
            if not json:
                print_error(f"{job.name}: {first_line(error)}")
        gc.collect()  # the models of this job


def measure(job: Job, settings: Mapping[str, Any], effort: Effort, json: bool) -> Record:
    """Measure one job. Raises the error of a system that does not run."""
    start = process_time()
    if job.system is not None and job.system.study is not None:
        return _measure_study(job.system, settings, effort, json)
    options = ModelOptions(
        job.model,
        recipe=[*job.recipes],
        seed=effort.seed,
        threads=effort.threads,
        json=True,
        settings=dict(job.settings),
        command="bench",
    )
    loaded = models.load(options, models.select(options))
    fast, left_out = _accelerate(loaded, job)
    made = workload(loaded, None, settings["prompts"], 1, effort.seed)
    with show_progress(json) as report:
        found = bench.compare(
            job.model,
            fast,
            made,
            repeats=effort.repeats,
            seed=effort.seed,
            peers=job.peers,
            controls=job.is_category,
            efficiency=False,
            progress=report,
        )
    left_out |= {row.recipe: row.skipped for row in found.baselines if row.skipped}
    record = Record.of(settings, found, left_out, process_time() - start)
    if job.is_category:
        return categories.add_entropy(record, loaded.model, made, effort.seed)
    return record


def _measure_study(
    system: System, settings: Mapping[str, Any], effort: Effort, json: bool
) -> Record:
    """Measure a system that is not a recipe with the module that it names."""
    assert system.study is not None
    start, study = process_time(), import_module(system.study)
    with show_progress(json) as report:
        found = study.measure(
            *(system.model, system.small, settings["prompts"]),
            repeats=effort.repeats,
            seed=effort.seed,
            progress=report,
        )
    return Record.of(settings, found, {}, process_time() - start)


def _accelerate(
    loaded: models.LoadedModels, job: Job
) -> tuple[dict[str, Accelerated], dict[str, str]]:
    """The recipes of a job, once more with its options; with `tree="auto"` those with a tree."""
    found, left_out = dict[str, Accelerated](), dict[str, str]()
    given = " ".join(f"{option}={value}" for option, value in job.options.items())
    for name in job.recipes:
        found[name] = loaded.accelerate(name)
        if given:
            found[f"{name}, {given}"] = loaded.accelerate(name, **job.options)
        plan_ = recipes.get(name)
        has_tree = plan_.takes_drafter and plan_.execution.walk == TREE
        if has_tree and "tree" in loaded.selection.owner.parts:
            try:
                found[f"{name}, {AUTO}"] = loaded.accelerate(name, tree="auto")
            except ValueError as error:
                left_out[f"{name}, {AUTO}"] = str(error)
    return found, left_out


def _lines(job: Job, store: Store, effort: Effort) -> list[Line]:
    settings = describe(job, effort)
    return lines_of(job, store.find(settings), store.find_failure(settings))


def _groups(jobs: Sequence[Job]) -> set[str]:
    return {job.group.name for job in jobs}


def _categories(
    jobs: Sequence[Job],
    lines: Sequence[Line],
    store: Store,
    effort: Effort,
    json: bool,
    measured: Collection[str],
) -> tuple[CategoryTable, ...]:
    """The tables of categories: of each section whose target is trained on them.

    Those of the sections `measured` are measured where they lack.
    """
    tables = []
    for group in {job.group.name: job.group for job in jobs}.values():
        model = categories.find_target(group)
        if model is None:
            continue
        head = categories.find_best_head(model, lines)
        planned = categories.plan_categories(group, model, head)
        if group.name in measured:
            measure_all(planned, store, effort, json)
        found = [(job, store.find(describe(job, effort))) for job in planned]
        tables.append(categories.make_table(model, head, found))
    return tuple(tables)


def _sections(
    jobs: Sequence[Job], lines: Sequence[Line], store: Store, effort: Effort
) -> tuple[Section, ...]:
    found = []
    for group in read_groups().values():
        mine = [job for job in jobs if job.group.name == group.name]
        model = mine[0].group.model
        own = [line for line in lines if line.section == group.name]
        records = [store.find(describe(job, effort)) for job in mine]
        about = next((_about(one) for one in records if one is not None), "not measured")
        found.append(Section(group.name, group.title, model, about, tuple(rank(own))))
    return tuple(found)


def _about(record: Record) -> str:
    settings = {**record.settings["settings"], "seed": record.settings["seed"]}
    shown = ", ".join(f"{name} {value}" for name, value in settings.items())
    where = ", ".join(f"{name} {value}" for name, value in record.environment.items())
    return (
        f"{record.requests} requests timed {record.settings['repeats']} times, {record.judged} "
        f"judged; {shown}; {where}"
    )


def _command(
    effort: Effort, vlm_model: str | None, out: Path, modality: Sequence[str] | None
) -> str:
    given = {f"--{name}": value for name, value in vars(effort).items()}
    given |= {"--vlm-model": vlm_model} if vlm_model else {}
    pairs = [*given.items(), *(("--modality", one) for one in modality or ())]
    return shlex.join(
        ["mmspec", "bench", "results", "--out", out.as_posix()]
        + [str(one) for pair in pairs for one in pair]
    )


def _plot(page: Page, out: Path) -> dict[str, str]:
    """Write a plot per section that has figures; return their names."""
    found = {}
    for section in page.sections:
        if any(line.speed is not None for line in section.lines):
            file = out.with_name(f"{out.stem}-{section.name}{PLOT}")
            plot_section(section, file)
            found[section.name] = file.name
    return found


def _show_plan(jobs: Sequence[Job], store: Store, effort: Effort, json: bool) -> None:
    """Print the rows that would be measured, with their settings."""
    rows = [(job, describe(job, effort)) for job in jobs]
    records = [store.find(settings) for _, settings in rows]
    if json:
        known = [one is not None for one in records]
        plan_ = [{**s, "measured": is_known} for (_, s), is_known in zip(rows, known, strict=True)]
        print_json(plan_)
        return
    cells = [
        (
            job.group.title,
            job.name,
            job.model,
            ", ".join(job.recipes),
            ", ".join(filter(None, dict.fromkeys(settings["drafters"].values()))),
            ", ".join(f"{name}={value}" for name, value in job.settings.items()),
            "to measure"
            if record is None
            else f"measured, {record.seconds:.0f} s of the processor",
        )
        for (job, settings), record in zip(rows, records, strict=True)
    ]
    print_table(cells, "section", "row", "target", "recipes", "drafters", "settings", "state")


def _report(page: Page, before: Page | None, out: Path, json: bool) -> None:
    systems = [line for line in page.lines if line.is_system]
    measured = sum(line.speed is not None for line in systems)
    moved = None if before is None else len(find_moves(before, page))
    known = None if before is None else count_repeated(before, page)
    if json:
        print_json({"page": str(out), "rows": len(page.lines), "moved": moved, "repeated": known})
        return
    text = f"{out}: {measured} rows of systems measured, {len(page.lines)} rows in all"
    text += "" if moved is None else f"; {moved} of {known} moved by more than their spread"
    console().print(text, markup=False)
