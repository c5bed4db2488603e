"""Synthesize speech plainly and speculatively, and compare the recordings.

    python demos/tts.py                                   # the bundled speaker
    python demos/tts.py --prompt "a red circle" --recipe coupled
    python demos/tts.py --model DIR --drafter DIR --voice anna

Writes the speech of plain decoding and of every recipe, with the same seed, as WAV files, and for
the first sentence a spectrogram, coloured by how many frames each round accepted. The table has
target calls, the time to the first audio, the real-time factor and, if the bundled recogniser is
available, the word error rate. Coupled recipes generate the codes of plain decoding (in float32).
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from mmspec.cli.models import load_models
from mmspec.cli.output import show_progress
from mmspec.modalities.speech.audio_quality import load_recogniser, word_errors
from mmspec.modalities.speech.sentences import sentence
from mmspec.modalities.speech.spectrogram import draw_spectrogram
from mmspec.modalities.speech.speech_loop import Speech

console = Console(highlight=False)
RECIPES = ("coupled", "ssd")


def main(
    model: Annotated[str | None, typer.Option(help="A folder; default: the bundled model.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Draft model; default: the bundled one.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    voice: Annotated[str | None, typer.Option(help="Name of a voice.")] = None,
    sentences: Annotated[int, typer.Option(min=1, help="Number of bundled sentences.")] = 4,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder for sounds and images.")] = Path(),
) -> None:
    """Synthesize every sentence plainly and with every recipe."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    chosen = recipe or list(RECIPES)
    try:
        loaded = load_models(
            model, "tts", drafter, chosen, seed, voice=voice, temperature=temperature
        )
    except ValueError as error:
        raise SystemExit(str(error)) from None
    ways = {name: loaded.accelerate(name) for name in ("plain", *chosen)}
    texts = prompt or [sentence(index, "held-out") for index in range(sentences)]
    for fast in ways.values():
        loaded.call(fast, loaded.formatter.request([texts[0]]), seed)  # warm-up
    speech: dict[str, list[Speech]] = {name: [] for name in ways}
    with show_progress(False) as bar:
        for index, text in enumerate(texts):
            request = loaded.formatter.request([text])
            for place, (name, fast) in enumerate(ways.items()):
                bar("sentences", index * len(ways) + place, len(texts) * len(ways))
                speech[name].append(loaded.call(fast, request, seed))
    written: list[Path] = []
    for name, column in speech.items():
        for index, one in enumerate(column):
            written += one.save(out / f"tts-{name}-{index}.wav")
        first = column[0]
        picture = draw_spectrogram(first.waveform, first.rounds[0], first.sampling_rate)
        written.append(out / f"tts-{name}.png")
        picture.save(written[-1])
    _table(speech, ways, texts)
    console.print(f"written to {out.resolve()}: {', '.join(file.name for file in written)}")


def _table(speech: dict[str, list[Speech]], ways: dict[str, Any], texts: list[str]) -> None:
    titles = ("recipe", "target calls", "first sound", "real-time factor", "word errors", "claims")
    table, (ear, why) = Table(*titles, box=None), load_recogniser()
    for name, column in speech.items():
        stats = [one.stats for one in column]
        first = [one.first_audio_ms for one in stats if one.first_audio_ms is not None]
        audio = sum(one.audio_seconds or 0 for one in stats)
        spent = sum(one.total_seconds + (one.codec_seconds or 0) for one in stats)
        errors = "-"
        if ear is not None:
            sounds = [one.waveform for one in column]
            found = word_errors(ear, texts, sounds, column[0].sampling_rate)
            wrong, words = sum(rate * n for rate, n in found), sum(n for _, n in found)
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
        console.print(f"no word error rate: {why}", style="yellow")


if __name__ == "__main__":
    typer.run(main)
