"""The page of a trace: one HTML file with its data, its style and its scripts, and no other."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

Json = dict[str, Any]
MOST_STEPS = 2000  # of the slider; a longer trace is thinned
MOST_CLOCK = 2000  # entries of the clock of plain decoding
UNPACK = (
    "<meta charset=utf-8><script>(async () => {"
    'const packed = Uint8Array.from(atob("@packed@"), (one) => one.charCodeAt(0));'
    'const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));'
    "const page = await new Response(stream).text();"
    "document.open(); document.write(page); document.close();"
    "})();</script>"
)
PARTS = ("prefill", "draft", "verify", "host")
SCRIPTS = (
    *("base", "text", "tree", "charts", "race"),
    *("picture", "denoising", "sound", "actions", "kept"),
    "main",  # last
)


def write_page(path: Path, header: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> None:
    """Write the page of a trace."""
    path.write_text(make_page(header, rounds), encoding="utf-8")


def make_page(header: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str:
    """The text of the page. Data stand in it as JSON without any "<", so nothing in them is run."""
    folder = files(__package__)
    page = folder.joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(make_data(header, rounds), ensure_ascii=False, separators=(",", ":"))
    scripts = [folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    title = html.escape(f"Trace of {header['model']} with {header['recipe']}")
    parts = {"title": title, "style": style, "script": "\n".join(scripts)}
    parts["data"] = data.replace("<", "\\u003c")
    return re.sub(r"@(title|style|script|data)@", lambda mark: parts[str(mark[1])], page)


def make_frame(page: str, height: int = 640) -> str:
    """A page as an element of another one, such as a notebook: packed, without a file of its own.

    A script in the frame unpacks it (Chrome 80, Firefox 113, Safari 16.4 and later).
    """
    packed = base64.b64encode(gzip.compress(page.encode(), mtime=0)).decode()
    inside = html.escape(UNPACK.replace("@packed@", packed))
    return (
        f'<iframe srcdoc="{inside}" title="A trace" '
        f'style="width:100%;height:{height}px;border:1px solid #8886;border-radius:8px"></iframe>'
    )


def make_data(header: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> Json:
    """What the scripts read."""
    steps, notes = _thin(rounds), list(header["notes"])
    if len(steps) < len(rounds):
        size = -(-len(rounds) // MOST_STEPS)
        notes.append(
            f"This trace is long and was thinned: a step of the slider is {size} rounds, and the "
            f"draft that is shown is the first of them. The JSONL file holds all {len(rounds)}."
        )
    if not rounds:
        notes.append("This trace has no rounds: nothing was decoded.")
    batch = header["batch"]
    kinds = {kind for step in steps for row in step["rows"] for kind in row["kinds"]}
    plain = _race(header, rounds)
    asked = header.get("prompt")
    return {
        "title": f"{header['recipe']} on {header['model']}",
        "asked": None if not asked else "\n".join(asked),
        "figures": _figures(header, rounds, plain),
        "notes": notes,
        "batch": batch if rounds else 0,
        "tokens": header["tokens"],
        "exact": header["exact"],
        "total": max(len(rounds) - 1, 0),
        "parts": 1 + max((one["part"] for one in rounds), default=0),
        "words": any("text" in row for one in rounds for row in one["rows"]),
        "kinds": sorted(kinds),
        "plain": plain,
        "rounds": steps,
        "views": header["views"],
    }


def _figures(
    header: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], plain: Json | None
) -> list[tuple[str, str]]:
    """Names and values of the whole request, counted from its rounds."""
    rows = [row for one in rounds for row in one["rows"]]
    drafted, accepted = (sum(map(len, (row[name] for row in rows))) for name in ("draft", "path"))
    new, calls = sum(len(row["tokens"]) for row in rows), sum(one["calls"] for one in rounds)
    seconds = {part: sum(_seconds(one)[i] for one in rounds) for i, part in enumerate(PARTS)}
    total = sum(seconds.values())
    settings = ", ".join(f"{name}={value}" for name, value in header["settings"].items())
    made = [
        ("recipe", f"{header['recipe']} ({'exact' if header['exact'] else 'lossy'})"),
        ("drafter saw", str(header["drafter_saw"])),
        (f"new {header['decodes']}", str(new)),
        ("target calls after the prefill", str(calls)),
        ("accepted of drafted", f"{accepted} of {drafted}"),
        ("seconds", f"{total:.3g}"),
    ]
    made += [
        (f"{part} time", f"{100 * value / (total or 1):.0f} %") for part, value in seconds.items()
    ]
    if plain is not None and plain["clock"] and total:
        how = "measured" if plain["measured"] else "estimated"
        made.insert(
            3, (f"plain decoding ({how})", f"{plain['clock'][-1][0] / total:.2f} x the time")
        )
    return made + ([("settings", settings)] if settings else [])


def _thin(rounds: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Steps of the slider: rounds, or the same number of them each where there are too many."""
    size = max(1, -(-len(rounds) // MOST_STEPS))
    first = {one["part"]: one["round"] for one in reversed(rounds)}
    return [_merge(rounds[start : start + size], first) for start in range(0, len(rounds), size)]


def _merge(group: Sequence[Mapping[str, Any]], first: Mapping[int, int]) -> Json:
    """One step of the slider; its draft is the first of the group."""
    rows = []
    for index in range(len(group[0]["rows"])):
        each = [(one["rows"][index], one) for one in group]
        shown = next((row for row, _ in each if row["draft"]), each[0][0])
        drafted = [row for row, _ in each if row["draft"]]
        made: Json = {
            "text": [text for row, _ in each for text in _texts(row, "text", "tokens")],
            "kinds": "".join(_kinds(row, one, first) for row, one in each),
            "accepted": sum(len(row["path"]) for row, _ in each),
            "drafted": sum(len(row["draft"]) for row, _ in each),
            "lengths": [len(row["path"]) for row in drafted],
            "depths": [_depth(row["parents"]) for row in drafted],
            "draft": _texts(shown, "draft_text", "draft"),
            "path": shown["path"],
        }
        if shown["parents"] != list(range(-1, len(shown["draft"]) - 1)):
            made["parents"] = shown["parents"]
        made |= {name: shown[name] for name in ("p", "q", "rank") if name in shown}
        if any(isinstance(code, int) for code in shown["draft"]) and "draft_text" in shown:
            made["ids"] = shown["draft"]
        rows.append(made)
    seconds = [sum(part) for part in zip(*map(_seconds, group), strict=True)]
    return {
        "round": group[0]["round"],
        "merged": len(group),
        "part": group[0]["part"],
        "calls": sum(one["calls"] for one in group),
        "seconds": seconds,
        "rows": rows,
    }


def _texts(row: Mapping[str, Any], text: str, ids: str) -> list[str]:
    """Tokens as text; without it as numbers, frames as their codes."""
    if text in row:
        return list(row[text])
    return ["·".join(map(str, one)) if isinstance(one, list) else str(one) for one in row[ids]]


def _kinds(row: Mapping[str, Any], round_: Mapping[str, Any], first: Mapping[int, int]) -> str:
    """How each new token came, a letter each: those of `KINDS` in base.js."""
    accepted: int = row["accepted"]
    is_first = round_["round"] == first[round_["part"]]
    is_unverified = accepted and not round_["calls"] and not is_first and not row["corrected"]
    own = "f" if is_first and not round_["calls"] else "o"
    if (row["path"][-1] if row["path"] else -1) in row["parents"]:
        own = "c"  # the target's token stands where a drafted one was refused
    return ("u" if is_unverified else "a") * accepted + own * (len(row["tokens"]) - accepted)


def _depth(parents: Sequence[int]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def _seconds(round_: Mapping[str, Any]) -> list[float]:
    return [round_["seconds"].get(part) or 0.0 for part in PARTS]


def _race(header: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> Json | None:
    """The clock of plain decoding: seconds, then tokens of each row; measured or estimated."""
    plain = header.get("plain")
    if plain is not None:
        note = "Both runs were measured: this request, and plain decoding of the same request."
        clock = plain["clock"]
        thinned = clock[:: -(-len(clock) // MOST_CLOCK) or 1]
        if thinned[-1:] != clock[-1:]:
            thinned.append(clock[-1])
        return {
            "measured": True,
            "note": note,
            "clock": thinned,
            "calls": plain["calls"],
            "parts": plain.get("parts", []),
            "frames": plain.get("frames", []),
            "same": plain["is_same"],
        }
    return _estimate_plain(header, rounds)


def _estimate_plain(header: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> Json | None:
    """Plain decoding as one target call per token, at the time of this request's own calls."""
    called = [one for one in rounds if one["calls"] == 1]
    alone = [one for one in called if not any(row["draft"] for row in one["rows"])]
    if not called or header["tokens"] == "states" or max(one["part"] for one in rounds):
        return None
    used, what = (alone, "that had no draft") if len(alone) >= 3 else (called, "with their drafts")
    each = median(sum(_seconds(one)[2:]) for one in used)
    prefill = sum(_seconds(one)[0] for one in rounds)
    rows = range(header["batch"])
    ends = [sum(len(one["rows"][row]["tokens"]) for one in rounds) for row in rows]
    longest = max(ends)
    places = range(1, longest + 1, -(-longest // MOST_CLOCK) or 1)
    clock = [
        [round(prefill + (done - 1) * each, 6), *(min(done, end) for end in ends)]
        for done in [*places, *([longest] if longest not in places else [])]
    ]
    note = (
        f"Plain decoding was not measured; it is estimated as one target call of {1e3 * each:.3g} "
        f"ms per token, the median of the {len(used)} calls {what} in this request"
        + (
            ". A call that checks a draft takes longer than one of plain decoding."
            if used is called
            else "."
        )
    )
    return {
        "measured": False,
        "note": note,
        "clock": clock,
        "calls": max(longest - 1, 0),
        "same": True,
    }
