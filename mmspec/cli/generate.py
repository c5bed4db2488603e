"""`mmspec generate`: generate once, and compare with plain decoding and the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mmspec import bench, registry
from mmspec.accelerated import Accelerated
from mmspec.bench.ranking import Ranking
from mmspec.cli.models import (
    LoadedModels,
    Selected,
    check_distinct,
    check_file,
    check_prompts,
    check_writable,
    load,
    select,
)
from mmspec.cli.options import ModelOptions, flag
from mmspec.cli.output import (
    console,
    format_percent,
    format_ratio,
    print_json,
    print_pairs,
    show_progress,
    show_status,
)
from mmspec.cli.streaming import STDOUT, refuse_with_stream, run_stream
from mmspec.cli.trace import TRACE_FILES, make_trace, watch_words, write_trace
from mmspec.modality import Selection, Workload
from mmspec.stats import Stats

COMPARED = (  # columns of a row that are reported for a single output
    *("calls", "fewer_calls", "speedup_end_to_end", "speedup_decode", "speedup_over_plain"),
    *("spread", "distance", "network_rows", "qualities", "extras"),
)

CALLS = "target calls after the prefill"
REPEATS = 5


def run(
    options: ModelOptions,
    prompt: str,
    out: Path | None,
    trace: Path | None,
    compare: bool | None,
    repeats: int | None,
    quiet: bool,
    stream: bool = False,
) -> None:
    """Generate, print or write the output, and measure it beside the library's generate()."""
    selected = select(options)
    given = {"--quiet": quiet, "--compare": bool(compare), "--repeats": repeats is not None}
    _check_combination(options, selected, out, stream, given, compare is not False)
    recipe = selected.recipe
    place = _output_file(None if out == STDOUT else out, trace, selected)
    check_prompts(selected.owner, [prompt])
    _check_sound(selected)
    if stream:
        run_stream(options, selected, prompt, out, trace)
        return
    loaded = load(options, selected)
    request, fast = loaded.formatter.request([prompt]), loaded.accelerate(recipe)
    live = None if quiet or options.json or out is not None else watch_words(loaded)
    record = None if trace is None else make_trace(loaded, prompt)
    watched = {"on_round": live, "trace": record}
    request |= {name: value for name, value in watched.items() if value is not None}
    with show_status(f"generating with {recipe}", options.json or live is not None):
        output = loaded.call(fast, request, options.seed)
    request = {name: value for name, value in request.items() if name not in watched}
    stats, formatter = fast.last_stats, loaded.formatter
    assert stats is not None
    text = formatter.text(output)
    if text is not None and out is None:
        place = None  # text needs no file
    files = () if place is None else formatter.render(output, place)
    document: dict[str, Any] = {
        **({} if text is None else {"text": text}),
        **({"out": str(files[0]), "files": [str(file) for file in files]} if files else {}),
        "model": selected.model,
        "drafter": selected.drafters[recipe],
        "recipe": recipe,
        "exact": stats.exact,
        "seed": options.seed,
        **formatter.data(output),
    }
    if not options.json:
        text_or_files = f"{', '.join(map(str, files))}: {prompt}" if text is None else text
        if live is None:
            console().print(text_or_files, markup=False)
        else:
            live.end()
        console().print()
    compares = compare is not False
    if record is not None and trace is not None:
        document["trace"] = str(write_trace(record, trace, loaded, request, compares, options))
    if compares:
        written = [str(one) for one in files]
        document |= _compare(options, loaded, fast, prompt, repeats or REPEATS, written)
    document["stats"] = stats.to_dict()
    if options.json:
        print_json(document)
    else:
        print_pairs([*_speed(document), *_run(document, stats)])
        if document.get("advice"):
            console().print(f"\n{document['advice']}", markup=False)


def _check_combination(
    options: ModelOptions,
    selected: Selected,
    out: Path | None,
    stream: bool,
    given: Mapping[str, bool],
    compares: bool,
) -> None:
    """Refuse options that others would ignore; `given` is which of the command's are given.

    Raises ValueError.
    """
    if not stream and out == STDOUT:
        raise ValueError("--out - writes sound to stdout as it is verified; add --stream")
    if stream:
        refuse_with_stream(options, selected, given)
    if not compares and given["--repeats"]:
        raise ValueError(
            "--repeats is how often a comparison measures, and --no-compare leaves it out; drop one"
        )


def _check_sound(selected: Selected) -> None:
    """Refuse to transcribe nothing. Raises ValueError."""
    for one in fields(selected.owner.settings):
        is_needed = one.metadata.get("reads") and one.metadata.get("replaces_prompt")
        if is_needed and getattr(selected.settings, one.name) is None:
            raise ValueError(
                f"{selected.model} reads an {one.metadata['reads']}; give {flag(one.name)} a file"
            )


def _output_file(out: Path | None, trace: Path | None, selected: Selected) -> Path | None:
    """The output file; None for text."""
    if out is not None:
        check_file("--out", out, selected.owner)
    if trace is not None:
        check_writable("--trace", trace, TRACE_FILES)
    usual = Path(f"mmspec{selected.owner.files[0]}") if selected.owner.files else None
    place = out or usual
    check_distinct({"--out": place, "--trace": trace, **selected.output_files})
    return place


def _compare(
    options: ModelOptions,
    loaded: LoadedModels,
    fast: Accelerated,
    prompt: str,
    repeats: int,
    written: list[str],
) -> dict[str, Any]:
    """Measure plain decoding, the library's generate() and the recipe in turns."""
    selected, measures = loaded.selection, registry.measures(loaded.selection.owner)
    recipe, selection = selected.recipe, Selection([prompt], 1, 1, options.seed)
    try:
        work = measures.workload(loaded.model, loaded.formatter, selected.settings, selection)
        with show_progress(options.json) as report:
            how: dict[str, Any] = {"repeats": repeats, "seed": options.seed, "progress": report}
            how |= {"peers": False, "efficiency": False}  # only plain decoding and the library
            found = bench.compare(selected.model, {recipe: fast}, work, **how)
        same = _same(fast, work, options.seed)
    except KeyboardInterrupt:
        written_note = f"; written: {', '.join(written)}" if written else "; the output is complete"
        raise KeyboardInterrupt(f"interrupted while comparing{written_note}") from None
    mine, plain = found.row(recipe), found.rows[0]
    base = next((row for row in found.baselines if row.skipped is None), None)
    every = [*found.rows, *found.baselines]
    return {
        **{name: getattr(mine, name) for name in COMPARED},
        "calls_plain": plain.calls,
        "baseline": None if base is None else base.recipe,
        "seconds_per_request": {row.recipe: row.seconds_per_request for row in every},
        "skipped": {row.recipe: row.skipped for row in every if row.skipped is not None},
        "identical_to_generate": None if mine.identical is None else mine.identical == 1,
        "identical_to_plain": same,
        "advice": Ranking.of(found, {}).suggest([recipe]),
    }


def _same(fast: Accelerated, work: Workload, seed: int) -> bool | None:
    """Whether plain decoding gives the same output; None if only the distribution is exact."""
    if not fast.recipe.exact or not fast.recipe.verifier.couples:
        return None
    mine, plain = (one.run(work.timed[0], seed) for one in (work.fast(fast), work.plain))
    return None if mine.values is None else bool(mine.values == plain.values)


def _speed(document: dict[str, Any]) -> list[tuple[str, Any]]:
    """Rows of the comparison that have a value."""
    if "calls" not in document:
        return []
    over, spread = document["baseline"], document["spread"]
    ratios = (
        (f"speed-up over {over}", "speedup_end_to_end"),
        ("  decoding only", "speedup_decode"),
        ("speed-up over plain decoding", "speedup_over_plain"),
    )
    rows: list[tuple[str, Any]] = [
        (title, format_ratio(document[name], spread.get(name)))
        for title, name in ratios
        if document[name] is not None
    ]
    rows += [
        (f"{CALLS}: plain, method", [document["calls_plain"], document["calls"]]),
        (f"identical to {over}", document["identical_to_generate"]),
        ("identical to plain decoding with this seed", document["identical_to_plain"]),
        ("distance from the target, per token", document["distance"]),
        *((name, value["value"]) for name, value in document["qualities"].items()),
        *(
            (name, value)
            for name, value in document["extras"].items()
            if not isinstance(value, dict)
        ),
    ]
    return [row for row in rows if row[1] is not None]


def _run(document: dict[str, Any], stats: Stats) -> list[tuple[str, Any]]:
    """Rows of the run's statistics."""
    parts = ("prefill", "draft", "verify", "host")
    shares = [getattr(stats, f"{part}_seconds") / (stats.total_seconds or 1) for part in parts]
    rows: list[tuple[str, Any]] = [
        ("mean acceptance length", stats.mean_acceptance_length),
        ("acceptance rate of drafts", format_percent(stats.draft_acceptance_rate)),
        ("tokens per target call", stats.tokens_per_target_call or None),
        (f"new tokens, {CALLS}", [stats.num_new_tokens, stats.target_calls]),
        ("drafts verified by the prefill", stats.prefill_steps or None),
        ("network rows", stats.network_rows or None),
        ("first audio: round, ms", _first_audio(stats)),
        (
            "prefill, draft, verify, host",
            ", ".join(map(format_percent, shares)) if any(shares) else None,
        ),
        ("drafter saw", stats.drafter_saw),
        ("recipe", f"{document['recipe']} ({'exact' if stats.exact else 'lossy'})"),
        ("model, drafter", [document["model"], document["drafter"]]),
        ("trace", document.get("trace")),
        ("fell back to plain decoding", stats.fallback),
    ]
    return [row for row in rows if row[1] is not None]


def _first_audio(stats: Stats) -> list[Any] | None:
    """When speech began to sound; None for other outputs."""
    if stats.first_audio_round is None or stats.first_audio_ms is None:
        return None
    return [stats.first_audio_round, round(stats.first_audio_ms)]
