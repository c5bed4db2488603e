"""Speculative speech, heard and seen side by side.

    python demos/tts.py                                   # the bundled speaker
    python demos/tts.py --prompt "a red circle" --recipe coupled
    python demos/tts.py --model DIR --drafter DIR --voice anna

Writes what plain decoding and every recipe say, with the same seed, as WAV files, and of the first
sentence a spectrogram whose spans have the colour of the round that accepted them. The table has
calls of the target, the time to the first sound, the real-time factor and, where the zoo's
recogniser is there, word errors. Coupled recipes say plain's very codes (in float32, as the zoo is
loaded); lossy ones say so.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from mmspec.cli.loaded import opened
from mmspec.cli.output import progress
from mmspec.modalities.speech.listening import listener, word_errors
from mmspec.modalities.speech.sentences import sentence
from mmspec.modalities.speech.spectrogram import spectrogram
from mmspec.modalities.speech.spoken import Speech

console = Console(highlight=False)
RECIPES = ("coupled", "ssd")


def main(
    model: Annotated[str | None, typer.Option(help="A folder; the zoo's own if not said.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Draft model; the zoo has its own.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    voice: Annotated[str | None, typer.Option(help="A speaker by name.")] = None,
    sentences: Annotated[int, typer.Option(min=1, help="How many of the zoo's.")] = 4,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder of sounds and pictures.")] = Path(),
) -> None:
    """Say every sentence plainly and with every recipe."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    chosen = recipe or list(RECIPES)
    try:
        loaded = opened(model, "tts", drafter, chosen, seed, voice=voice, temperature=temperature)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    ways = {name: loaded.fast(name) for name in ("plain", *chosen)}
    texts = prompt or [sentence(index, "held-out") for index in range(sentences)]
    for fast in ways.values():
        loaded.ask(fast, loaded.formatter.request([texts[0]]), seed)  # warm-up
    spoken: dict[str, list[Speech]] = {name: [] for name in ways}
    with progress(False) as bar:
        for index, text in enumerate(texts):
            request = loaded.formatter.request([text])
            for place, (name, fast) in enumerate(ways.items()):
                bar("sentences", index * len(ways) + place, len(texts) * len(ways))
                spoken[name].append(loaded.ask(fast, request, seed))
    written: list[Path] = []
    for name, column in spoken.items():
        for index, one in enumerate(column):
            written += one.save(out / f"tts-{name}-{index}.wav")
        first = column[0]
        picture = spectrogram(first.waveform, first.rounds[0], first.sampling_rate)
        written.append(out / f"tts-{name}.png")
        picture.save(written[-1])
    _table(spoken, ways, texts)
    console.print(f"written to {out.resolve()}: {', '.join(file.name for file in written)}")


def _table(spoken: dict[str, list[Speech]], ways: dict[str, Any], texts: list[str]) -> None:
    titles = ("recipe", "target calls", "first sound", "real-time factor", "word errors", "claims")
    table, (ear, why) = Table(*titles, box=None), listener()
    for name, column in spoken.items():
        stats = [one.stats for one in column]
        first = [one.first_audio_ms for one in stats if one.first_audio_ms is not None]
        audio = sum(one.audio_seconds or 0 for one in stats)
        spent = sum(one.total_seconds + (one.codec_seconds or 0) for one in stats)
        errors = "-"
        if ear is not None:
            sounds = [one.waveform for one in column]
            found = word_errors(ear, texts, sounds, column[0].sampling_rate)
            wrong, words = sum(rate * many for rate, many in found), sum(n for _, n in found)
            errors = f"{wrong / words:.1%}"
        table.add_row(
            name,
            f"{fmean(one.target_calls for one in stats):.1f}",
            f"{fmean(first):.0f} ms" if first else "-",
            f"{spent / audio:.2f}" if audio else "-",
            errors,
            "exact" if ways[name].recipe.exact else "lossy",
        )
    console.print(table)
    if ear is None:
        console.print(f"nobody listens: {why}", style="yellow")


if __name__ == "__main__":
    typer.run(main)
