"""Transcribe recordings plainly and speculatively, and compare text and speed.

    python demos/asr.py                                  # the bundled recogniser and recordings
    python demos/asr.py --audio memo.wav --recipe specasr
    python demos/asr.py --model DIR --drafter DIR --audio memo.wav

Every recording is transcribed plainly and with every recipe. Green words are accepted draft tokens,
the others were predicted by the target. The text is the same; the table has target calls and the
real-time factor. For the first recording a spectrogram is written, coloured by how many tokens
each round accepted; tokens are spread evenly over the sound.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmspec.cli.models import load_models
from mmspec.draft import Round
from mmspec.modalities.common.sound import Sound, read
from mmspec.modalities.speech.recordings import recordings
from mmspec.modalities.speech.spectrogram import draw_spectrogram

console = Console(highlight=False)
RECIPES = ("whisper-assisted", "specasr", "prompt-lookup")


@dataclass
class TranscriptResult:
    """The transcript of one sound with one recipe."""

    text: str
    styled: Text
    rounds: list[int]  # the round of every token
    calls: int
    seconds: float


def main(
    model: Annotated[str | None, typer.Option(help="A folder; default: the bundled model.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Draft model; default: the bundled one.")
    ] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="May be repeated.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of bundled recordings.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the images.")] = Path(),
) -> None:
    """Transcribe every recording plainly and with every recipe."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    chosen = recipe or list(RECIPES)
    try:
        loaded = load_models(model, "asr", drafter, chosen)
        sounds = [read(one) for one in audio or [one.path for one in recordings()[:count]]]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    ways = {name: loaded.accelerate(name) for name in dict.fromkeys(("plain", *chosen))}
    for fast in ways.values():
        transcribe(fast, loaded.formatter, sounds[0])  # warm-up
    found = {
        name: [transcribe(one, loaded.formatter, s) for s in sounds] for name, one in ways.items()
    }
    for index in range(len(sounds)):
        for name, column in found.items():
            console.print(Text(f"{name:>18}  "), column[index].styled, sep="")
    _table(found, sounds)
    same = all([one.text for one in column] == _texts(found) for column in found.values())
    console.print(f"all recipes wrote what plain decoding wrote: {'yes' if same else 'NO'}")
    for name, column in found.items():
        first, place = sounds[0], out / f"asr-{name}.png"
        turns = torch.tensor(column[0].rounds)
        draw_spectrogram(first.samples, turns, first.rate_hz, "tokens").save(place)
    console.print(f"spectrograms written to {out.resolve()}")


def transcribe(fast: Any, formatter: Any, sound: Sound) -> TranscriptResult:
    """Transcribe a sound and record its rounds."""
    rounds: list[Round] = []
    request = formatter.request([""], sounds=[sound])
    start = perf_counter()
    output = fast.generate(**request, on_round=rounds.append)
    spent = perf_counter() - start
    words = Text()
    for one in rounds:
        for place, token in enumerate(one.tokens[0]):
            style = "green" if place < one.accepted[0] else ""
            words.append(_decode_token(formatter, token), style)
    turns = [index for index, one in enumerate(rounds) for _ in one.tokens[0]]
    return TranscriptResult(formatter.text(output), words, turns, output.stats.target_calls, spent)


def _decode_token(formatter: Any, token: int) -> str:
    """Decode a token with its leading space; empty for special tokens."""
    tokenizer = formatter.processor.tokenizer
    if not formatter.decode([token]) and token in tokenizer.all_special_ids:
        return ""
    return str(tokenizer.decode([token], skip_special_tokens=True))


def _texts(found: dict[str, list[TranscriptResult]]) -> list[str]:
    return [one.text for one in found["plain"]]


def _table(found: dict[str, list[TranscriptResult]], sounds: list[Sound]) -> None:
    table = Table("recipe", "target calls", "real-time factor", "speed-up over plain", box=None)
    audio = sum(sound.seconds for sound in sounds)
    plain = sum(one.seconds for one in found["plain"])
    for name, column in found.items():
        spent, calls = sum(one.seconds for one in column), sum(one.calls for one in column)
        table.add_row(name, str(calls), f"{spent / audio:.3f}", f"{plain / spent:.2f}x")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
