"""Speculative transcripts, read and seen side by side.

    python demos/asr.py                                  # the bundled recogniser and recordings
    python demos/asr.py --audio memo.wav --recipe specasr
    python demos/asr.py --model DIR --drafter DIR --audio memo.wav

Writes down every recording plainly and with every recipe. Green words were drafted and accepted,
plain ones are the target's own. The text is the same; the table says in how many calls of the
target, and how many seconds of work a second of sound took. Of the first recording a spectrogram
is written whose spans have the colour of the round that brought them: tokens are spread evenly over
the sound, in the order they were written.
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

from mmspec.cli.loaded import opened
from mmspec.draft import Round
from mmspec.modalities.speech.recordings import recordings
from mmspec.modalities.speech.sound import Sound, read
from mmspec.modalities.speech.spectrogram import spectrogram

console = Console(highlight=False)
RECIPES = ("whisper-assisted", "specasr", "prompt-lookup")


@dataclass
class Take:
    """What one recipe made of one sound."""

    text: str
    words: Text
    turns: list[int]  # the round of every token
    calls: int
    seconds: float


def main(
    model: Annotated[str | None, typer.Option(help="A folder; the zoo's own if not said.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Draft model; the zoo has its own.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="May be repeated.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many of the bundled recordings.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path(),
) -> None:
    """Write every recording down plainly and with every recipe."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    chosen = recipe or list(RECIPES)
    try:
        loaded = opened(model, "asr", drafter, chosen)
        sounds = [read(one) for one in audio or [one.path for one in recordings()[:count]]]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    ways = {name: loaded.fast(name) for name in dict.fromkeys(("plain", *chosen))}
    for fast in ways.values():
        listened(fast, loaded.formatter, sounds[0])  # warm-up
    found = {
        name: [listened(one, loaded.formatter, s) for s in sounds] for name, one in ways.items()
    }
    for index in range(len(sounds)):
        for name, column in found.items():
            console.print(Text(f"{name:>18}  "), column[index].words, sep="")
    _table(found, sounds)
    same = all([one.text for one in column] == _texts(found) for column in found.values())
    console.print(f"all recipes wrote what plain decoding wrote: {'yes' if same else 'NO'}")
    for name, column in found.items():
        first, place = sounds[0], out / f"asr-{name}.png"
        turns = torch.tensor(column[0].turns)
        spectrogram(first.samples, turns, first.rate_hz, "tokens").save(place)
    console.print(f"spectrograms written to {out.resolve()}")


def listened(fast: Any, formatter: Any, sound: Sound) -> Take:
    """One transcript, its rounds watched."""
    rounds: list[Round] = []
    request = formatter.request([""], sounds=[sound])
    start = perf_counter()
    output = fast.generate(**request, on_round=rounds.append)
    spent = perf_counter() - start
    words = Text()
    for kept in rounds:
        for place, token in enumerate(kept.tokens[0]):
            style = "green" if place < kept.accepted[0] else ""
            words.append(_letters(formatter, token), style)
    turns = [index for index, kept in enumerate(rounds) for _ in kept.tokens[0]]
    return Take(formatter.text(output), words, turns, output.stats.target_calls, spent)


def _letters(formatter: Any, token: int) -> str:
    """A token as it reads, with the space before it; nothing of marks."""
    spoken = formatter.processor.tokenizer
    if not formatter.words([token]) and token in spoken.all_special_ids:
        return ""
    return str(spoken.decode([token], skip_special_tokens=True))


def _texts(found: dict[str, list[Take]]) -> list[str]:
    return [one.text for one in found["plain"]]


def _table(found: dict[str, list[Take]], sounds: list[Sound]) -> None:
    table = Table("recipe", "target calls", "real-time factor", "speed-up over plain", box=None)
    audio = sum(sound.seconds for sound in sounds)
    plain = sum(one.seconds for one in found["plain"])
    for name, column in found.items():
        spent, calls = sum(one.seconds for one in column), sum(one.calls for one in column)
        table.add_row(name, str(calls), f"{spent / audio:.3f}", f"{plain / spent:.2f}x")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
