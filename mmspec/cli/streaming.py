"""`mmspec generate --stream`: text and speech as they are verified; what was measured on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from rich.console import Console
from torch import Tensor

from mmspec.accelerated import Accelerated
from mmspec.cli.models import Selected, load
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import console
from mmspec.cli.trace import WordPrinter, find_processor, make_trace, write_trace
from mmspec.draft import Round
from mmspec.modalities.common.sound import WavWriter, encode_pcm
from mmspec.serving.speech import SpeechSession
from mmspec.stats import Stats
from mmspec.tracing.words import Words

STDOUT = Path("-")


class Sink(Protocol):
    """Where samples are written."""

    def write(self, samples: Tensor) -> None: ...
    def close(self) -> None: ...


def refuse_with_stream(
    options: ModelOptions, selected: Selected, others: Mapping[str, bool]
) -> None:
    """Refuse options that a stream would ignore; `others` is which of the command's are given.

    Raises ValueError.
    """
    given = {"--json": options.json, **others, **dict.fromkeys(selected.output_files, True)}
    ignored = [name for name, is_given in given.items() if is_given]
    if ignored:
        raise ValueError(
            f"--stream writes the output alone, while it is generated; drop {', '.join(ignored)} "
            "or --stream"
        )


def run_stream(
    options: ModelOptions, selected: Selected, prompt: str, out: Path | None, trace: Path | None
) -> None:
    """Write the output of a request as it is verified.

    Raises ValueError for models whose outputs are neither text nor speech.
    """
    loaded = load(options, selected)
    fast = loaded.accelerate(selected.recipe)
    processor = find_processor(loaded)
    speaks = isinstance(fast.session, SpeechSession)
    if not speaks and processor is None:
        raise ValueError(
            f"--stream writes text and speech, and {selected.model} generates neither; drop it, or "
            "call fast.stream() from Python"
        )
    if not speaks and out is not None:
        raise ValueError(f"--stream prints text to stdout; drop --out {out}, or --stream")
    request = dict(loaded.formatter.request([prompt]))
    record = None if trace is None else make_trace(loaded, prompt)
    if record is not None:
        request["trace"] = record

    def call(observe: Callable[[Round], None]) -> Any:
        return loaded.call(fast, {**request, "on_round": observe}, options.seed)

    report = _stream_speech(call, fast, out) if speaks else _stream_text(call, fast, processor)
    if record is not None and trace is not None:
        write_trace(record, trace, loaded, request, False, options)
    recipe = f"{selected.recipe} ({'exact' if fast.recipe.exact else 'lossy'})"
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"{report}; {recipe}", markup=False)


def _stream_text(call: Callable[..., Any], fast: Accelerated, processor: Any) -> str:
    """Print words as they are verified; returns the report."""
    printer = WordPrinter(console(), Words(processor, skips_special=True))
    start, first_ms = perf_counter(), list[float]()

    def observe(round_: Round) -> None:
        printer(round_)
        if round_.tokens[0] and not first_ms:
            first_ms.append(1e3 * (perf_counter() - start))

    call(observe)
    seconds, stats = perf_counter() - start, _last_stats(fast)
    printer.end()
    first = f"first token after {first_ms[0]:.0f} ms, " if first_ms else ""
    return f"{first}{stats.num_new_tokens} tokens in {seconds:.2f} s"


def _stream_speech(call: Callable[..., Any], fast: Accelerated, out: Path | None) -> str:
    """Write samples as their codes are verified; returns the report."""
    session: Any = fast.session
    codec, count = session.codec, 0
    codec.measure()
    place = Path("mmspec.wav") if out is None else out
    sink: Sink = StdoutSamples() if place == STDOUT else WavWriter(place, codec.sampling_rate)

    def write(waveform: Tensor) -> None:
        nonlocal count
        sink.write(waveform[count:])
        count = len(waveform)

    with closing(sink):
        start = perf_counter()
        try:
            output = call(lambda round_: write(round_.partial()[0]))
            write(output.waveform)
        except KeyboardInterrupt:
            done = count / codec.sampling_rate
            raise KeyboardInterrupt(f"interrupted; {place} has the first {done:.2f} s") from None
    seconds, audio, stats = perf_counter() - start, count / codec.sampling_rate, _last_stats(fast)
    first = "no sound"
    if stats.first_audio_round is not None and stats.first_audio_ms is not None:
        first = (
            f"first sound in round {stats.first_audio_round} after {stats.first_audio_ms:.0f} ms"
        )
    if not codec.streams:
        first += " (this codec decodes whole utterances, so all came at the end; see --codec)"
    factor = f", real-time factor {seconds / audio:.2f}" if audio else ""
    where = "to stdout" if place == STDOUT else f"to {place}"
    return f"{first}; {audio:.2f} s of sound in {seconds:.2f} s{factor}, {where}"


class StdoutSamples:
    """Writes samples to stdout as 16-bit little-endian integers, without a header."""

    def write(self, samples: Tensor) -> None:
        """Write samples (n,). Raises ValueError where nobody reads them any more."""
        try:
            sys.stdout.buffer.write(encode_pcm(samples))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
            raise ValueError("the reader of stdout has closed it; the rest is lost") from None

    def close(self) -> None:
        """Stdout stays open."""


def _last_stats(fast: Accelerated) -> Stats:
    assert fast.last_stats is not None
    return fast.last_stats
