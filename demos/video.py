"""Answer questions about a clip plainly and speculatively, with every compressor.

    python demos/video.py                                        # the bundled model and its clip
    python demos/video.py --video F.mp4 --prompt "what moves?" --compressor top-p-uniform:keep=0.1
    python demos/video.py --model DIR --drafter DIR --video F.mp4

The draft model reads the whole clip, then what a compressor leaves of it; the target always reads
the whole clip, so the answer is the same. Writes `video-kept.png`: one row per compressor with the
frames side by side; blue marks a kept token, yellow a merged one, dark a dropped one.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from mmspec.bench.studies.compressors import TracingCompressor
from mmspec.bench.studies.kept_tokens import draw
from mmspec.cli.models import load_models
from mmspec.compressors import parse_compressor

console = Console(highlight=False)
COMPRESSORS = (
    "identity",
    "average-pool",
    "temporal-redundancy",
    "bipartite-merge:keep=0.25",
    "farthest-point:keep=0.25",
    "attn-topk:keep=0.25",
    "top-p-uniform:keep=0.25",
    "holistic:keep=0.25",
)


def main(
    model: Annotated[str, typer.Option(help="zoo:video, or a folder.")] = "zoo:video",
    drafter: Annotated[
        str | None, typer.Option(help="Draft model; default: the bundled one.")
    ] = None,
    video: Annotated[str, typer.Option(help="A file, or a folder of images.")] = "zoo:clip",
    frames: Annotated[int | None, typer.Option(min=1, help="Number of frames.")] = None,
    prompt: str = "what happens?",
    recipe: str = "coupled",
    compressor: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    max_new_tokens: int = 160,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the image.")] = Path(),
) -> None:
    """Answer plainly, with the draft model, and with every compressor for the draft model."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    settings: dict[str, Any] = {"video": video, "frames": frames, "max_new_tokens": max_new_tokens}
    loaded = load_models(model, "vlm", drafter, [recipe], **settings)
    request = loaded.formatter.request([prompt])
    watched = {
        text: TracingCompressor(parse_compressor(text)) for text in compressor or COMPRESSORS
    }
    ways = {"plain": loaded.accelerate_plain(), recipe: loaded.accelerate(recipe)}
    ways |= {text: loaded.accelerate(recipe, compressor=one) for text, one in watched.items()}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    made: dict[str, Any] = {}
    for _ in range(1 + repeats):  # the first is a warm-up
        for name, fast in ways.items():
            start = perf_counter()
            made[name] = fast.generate(**request)
            spent[name].append(perf_counter() - start)
    console.print(f"[bold]{prompt}[/bold]\n{loaded.formatter.text(made['plain'])}\n")
    seconds = {name: median(times[1:]) for name, times in spent.items()}
    _table(made, seconds, watched)
    traces = {name: one.traces[0] for name, one in watched.items() if one.traces}
    draw(traces, out / "video-kept.png")
    console.print(f"video-kept.png is in {out.resolve()}")


def _table(
    made: dict[str, Any], seconds: dict[str, float], watched: dict[str, TracingCompressor]
) -> None:
    heads = ("draft model sees", "visual tokens", "target calls", "milliseconds", "faster", "text")
    table = Table(*heads, box=None)
    plain = made["plain"]
    for name, out in made.items():
        traces = watched[name].traces[:1] if name in watched else []
        kept = "".join(f"{one.kept} of {len(one.sizes)}" for one in traces)
        same = out.sequences.tolist() == plain.sequences.tolist()
        table.add_row(
            name,
            kept,
            str(out.stats.target_calls),
            f"{1e3 * seconds[name]:.0f}",
            f"{seconds['plain'] / seconds[name]:.2f}x",
            "the same" if same else "ANOTHER",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
