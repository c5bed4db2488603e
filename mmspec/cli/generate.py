"""What `mmspec generate` does: an answer or a picture, and what speculation made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec import bench, registry
from mmspec.api import Accelerated
from mmspec.cli.choosing import Chosen, check_apart, check_file, choose
from mmspec.cli.loaded import Loaded, load
from mmspec.cli.options import Choice
from mmspec.cli.output import console, emit, pairs, percent, progress, times, working
from mmspec.modality import Selection, Workload
from mmspec.stats import Stats

COMPARED = (  # columns of a row that are said of a single answer
    *("calls", "fewer_calls", "speedup_end_to_end", "speedup_decode", "speedup_over_plain"),
    *("spread", "distance", "network_rows", "qualities", "extras"),
)


def run(choice: Choice, prompt: str, out: Path | None, compare: bool, repeats: int) -> None:
    """Ask, say what came out, and measure it beside what the library does itself."""
    chosen = choose(choice)
    recipe, place = chosen.recipe, _place(out, chosen)
    loaded = load(choice, chosen)
    request, fast = loaded.formatter.request([prompt]), loaded.fast(recipe)
    with working(f"generating with {recipe}", choice.json):
        output = loaded.ask(fast, request, choice.seed)
    stats, formatter = fast.last_stats, loaded.formatter
    assert stats is not None
    text = formatter.text(output)
    if text is not None and out is None:
        place = None  # what was said needs no file
    files = () if place is None else formatter.render(output, place)
    document: dict[str, Any] = {
        **({} if text is None else {"text": text}),
        **({"out": str(files[0]), "files": [str(file) for file in files]} if files else {}),
        "model": chosen.model,
        "drafter": chosen.drafters[recipe],
        "recipe": recipe,
        "exact": stats.exact,
        "seed": choice.seed,
        **formatter.data(output),
    }
    if not choice.json:
        shown = f"{', '.join(map(str, files))}: {prompt}" if text is None else text
        console().print(shown, markup=False)
        console().print()
    if compare:
        document |= _compared(choice, loaded, fast, prompt, repeats, [str(one) for one in files])
    document["stats"] = stats.to_dict()
    if choice.json:
        emit(document)
    else:
        pairs([*_speed(document), *_run(document, stats)])


def _place(out: Path | None, chosen: Chosen) -> Path | None:
    """Where the output goes; nowhere for those that write text."""
    if out is not None:
        check_file("--out", out, chosen.owner)
    usual = Path(f"mmspec{chosen.owner.files[0]}") if chosen.owner.files else None
    place = out or usual
    check_apart({"--out": place, **chosen.written})
    return place


def _compared(
    choice: Choice,
    loaded: Loaded,
    fast: Accelerated,
    prompt: str,
    repeats: int,
    written: list[str],
) -> dict[str, Any]:
    """Plain decoding, the library's own way and the recipe in turns, in this process."""
    chosen, measures = loaded.chosen, registry.measures(loaded.chosen.owner)
    recipe, selection = chosen.recipe, Selection([prompt], 1, 1, choice.seed)
    try:
        work = measures.workload(loaded.model, loaded.formatter, chosen.settings, selection)
        with progress(choice.json) as report:
            how: dict[str, Any] = {"repeats": repeats, "seed": choice.seed, "progress": report}
            how |= {"peers": False, "efficiency": False}  # only plain decoding and the library
            found = bench.compare(chosen.model, {recipe: fast}, work, **how)
        same = _same(fast, work, choice.seed)
    except KeyboardInterrupt:
        kept = f"; written: {', '.join(written)}" if written else "; the answer is complete"
        raise KeyboardInterrupt(f"interrupted while comparing{kept}") from None
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
    }


def _same(fast: Accelerated, work: Workload, seed: int) -> bool | None:
    """Whether plain decoding gives the very same; None where only the distribution is promised."""
    if not fast.recipe.exact or not fast.recipe.verifier.couples:
        return None
    mine, plain = (one.run(work.timed[0], seed) for one in (work.fast(fast), work.plain))
    return None if mine.values is None else bool(mine.values == plain.values)


def _speed(document: dict[str, Any]) -> list[tuple[str, Any]]:
    """What the comparison found, as far as it means something here."""
    if "calls" not in document:
        return []
    over, spread = document["baseline"], document["spread"]
    ratios = (
        (f"speed-up over {over}", "speedup_end_to_end"),
        ("  decoding only", "speedup_decode"),
        ("speed-up over plain decoding", "speedup_over_plain"),
    )
    rows: list[tuple[str, Any]] = [
        (title, times(document[name], spread.get(name)))
        for title, name in ratios
        if document[name] is not None
    ]
    rows += [
        ("target calls: plain, method", [document["calls_plain"], document["calls"]]),
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
    """What the run itself reports."""
    parts = ("prefill", "draft", "verify", "host")
    shares = [getattr(stats, f"{part}_seconds") / (stats.total_seconds or 1) for part in parts]
    rows: list[tuple[str, Any]] = [
        ("mean acceptance length", stats.mean_acceptance_length),
        ("acceptance rate of drafts", percent(stats.draft_acceptance_rate)),
        ("tokens per target call", stats.tokens_per_target_call),
        ("new tokens, target calls", [stats.num_new_tokens, stats.target_calls]),
        ("network rows", stats.network_rows or None),
        ("prefill, draft, verify, host", ", ".join(map(percent, shares))),
        ("drafter saw", stats.drafter_saw),
        ("recipe", f"{document['recipe']} ({'exact' if stats.exact else 'lossy'})"),
        ("model, drafter", [document["model"], document["drafter"]]),
        ("fell back to plain decoding", stats.fallback),
    ]
    return [row for row in rows if row[1] is not None]
