"""Measure when speech begins to sound, and what its codec costs over the length of the answer.

    python -m tools.zoo.speech.synthesis.measure_stream

Prints, for answers of several lengths whose codes arrive in pieces, the frames that the codec
decoded and its milliseconds per frame, beside decoding all codes so far for every piece; then, for
held-out sentences, the round and the milliseconds of the first sound.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
import typer
from torch import Tensor

from mmspec import zoo
from mmspec.api import accelerate
from mmspec.modalities.speech.codecs import Codec, CodecStream, load_codec
from mmspec.modalities.speech.sentences import held_out_sentences
from mmspec.modalities.speech.utterances import cycle_speakers
from tools.zoo.speech.synthesis.streaming_codec import STREAMING_CODEC

TARGET, DRAFTER = "codec-lm", "zoo:codec-lm-drafter"
FRAMES = (50, 100, 200, 400)


def main(piece: int = 2, sentences: int = 10, repeats: int = 3) -> None:
    """Measure on one thread; `piece` is the number of frames of a round."""
    torch.set_num_threads(1)
    codec = load_codec(zoo.path(TARGET) / STREAMING_CODEC)
    codec.final_samples(1)  # measures the codec
    for frames in FRAMES:
        codes = (torch.arange(frames) * 7919 % codec.size)[None]
        for name, run in {"stream": stream_pieces, "all again": decode_all_again}.items():
            seconds = []
            for _ in range(repeats):
                start = perf_counter()
                decoded = run(codec, codes, piece)
                seconds.append(perf_counter() - start)
            each_ms = 1e3 * min(seconds) / frames
            typer.echo(f"{frames} frames, {name}: {decoded} decoded, {each_ms:.2f} ms per frame")
    ways: dict[str, dict[str, Any]] = {"plain": {}, "coupled": {"drafter": DRAFTER, "length": 1}}
    for recipe, parts in ways.items():
        fast = accelerate(f"zoo:{TARGET}", recipe, codec=STREAMING_CODEC, **parts)
        texts, voices = held_out_sentences(sentences), cycle_speakers(sentences)
        found: list[Any] = [
            fast.synthesize(text, voice=voice, seed=0).stats
            for text, voice in zip(texts, voices, strict=True)
        ][1:]  # the first call measures the codec
        rounds = sorted({one.first_audio_round for one in found})
        wait = median(one.first_audio_ms for one in found)
        typer.echo(f"{recipe}: first sound in rounds {rounds}, after {wait:.0f} ms")


def stream_pieces(codec: Codec, codes: Tensor, piece: int) -> int:
    """Decode codes (1, T) as they arrive; returns the number of frames that were decoded."""
    counted: Any = CountedCodec(codec)
    stream = CodecStream(counted)
    for end in range(piece, codes.shape[1] + 1, piece):
        stream.extend(codes[:, :end], codec.final_samples(end))
    return int(counted.decoded)


def decode_all_again(codec: Codec, codes: Tensor, piece: int) -> int:
    """Decode all codes so far for every piece."""
    counted: Any = CountedCodec(codec)
    for end in range(piece, codes.shape[1] + 1, piece):
        counted.decode(codes[:, :end])
    return int(counted.decoded)


class CountedCodec:
    """A codec that counts the frames it decodes."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.decoded = codec, 0
        self.hop, self.context = codec.hop, codec.context

    def decode(self, codes: Tensor) -> Tensor:  # (K, T) -> (S,)
        self.decoded += codes.shape[1]
        return self.codec.decode(codes)


if __name__ == "__main__":
    typer.run(main)
