"""Audio codecs of transformers: decode frames of codes to waveforms.

A codec has K codebooks; a frame is one code of each and decodes to `hop` samples. Only accepted
frames are decoded, without a state of the codec, so none is ever rolled back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from mmspec.errors import check_number, explain_load_errors, format_value, is_integer
from mmspec.models.folder import read_shapes

PROBE = 24  # frames on which the lookahead of a codec is measured
CONTEXTS = (4, 6, 8, 12, 16, PROBE, 2 * PROBE)  # frames before new ones that are tried
DECODED_BOOKS = "decoded_codebooks"  # config field of a codec that decodes its first books only
CHANGED = 1e-5  # of the largest sample: rounding differences between lengths are below


@dataclass(frozen=True)
class _CodecFields:
    """Configuration fields of a codec family."""

    books: str | int  # number of codebooks, or the attribute that holds it
    size: Callable[[Any], int]  # codes per book
    rate: str = "sampling_rate"  # samples per second


def _levels(config: Any) -> int:
    size = 1
    for level in config.quantization_levels:
        size *= int(level)
    return size


_CODEC_FIELDS: Mapping[str, _CodecFields] = {
    "encodec": _CodecFields("num_quantizers", lambda config: config.codebook_size),
    "mimi": _CodecFields("num_quantizers", lambda config: config.codebook_size),
    "dac": _CodecFields("n_codebooks", lambda config: config.codebook_size),
    "xcodec": _CodecFields("num_quantizers", lambda config: config.codebook_size, "sample_rate"),
    "xcodec2": _CodecFields(1, _levels),
    "neucodec": _CodecFields(1, _levels, "output_sampling_rate"),
}


@dataclass(frozen=True, eq=False)
class Codec:
    """A codec model and its dimensions."""

    model: Any
    books: int  # K
    size: int  # codes per book
    sampling_rate: int  # Hz

    @classmethod
    def of(cls, model: Any) -> Codec:
        """Read the dimensions of a codec. Raises ValueError for models that are not supported."""
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind is None or kind not in _CODEC_FIELDS:
            raise ValueError(
                f"codec={format_value(model)} is not a codec known here; give one of "
                f"{', '.join(_CODEC_FIELDS)} (transformers), or its folder"
            )
        facts, config = _CODEC_FIELDS[kind], model.config
        if getattr(config, "normalize", False) or getattr(config, "chunk_length_s", None):
            raise ValueError(
                f"{type(model).__name__} scales its audio in chunks, and language models do not "
                "predict the scales; give a codec with normalize=False and chunk_length_s=None"
            )
        if getattr(config, "audio_channels", 1) != 1:
            raise ValueError(
                f"{type(model).__name__} decodes {config.audio_channels} channels; give a codec "
                "with one"
            )
        total = facts.books if isinstance(facts.books, int) else int(getattr(config, facts.books))
        books = getattr(config, DECODED_BOOKS, total)
        if not is_integer(books) or not 1 <= books <= total:
            raise ValueError(
                f"{DECODED_BOOKS}={format_value(books)} of a {type(model).__name__} must be 1 to "
                f"{total}, its codebooks; give their number, or drop it for all"
            )
        return cls(model, int(books), int(facts.size(config)), int(getattr(config, facts.rate)))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:  # (K, T) int64 -> (S,) float32
        """The waveform of one utterance; empty without frames."""
        if not codes.shape[1]:
            return torch.zeros(0)
        codes = codes[None].to(self.model.device)
        if self.model.config.model_type == "encodec":
            made = self.model.decode(codes[None], [None])
        else:
            made = self.model.decode(audio_codes=codes)
        sound = made if isinstance(made, Tensor) else made.audio_values
        return sound.reshape(-1).float().cpu()

    @cached_property
    def hop(self) -> int:
        """Samples per frame."""
        return len(self._decoded_probe) // (2 * PROBE)

    def frames(self, seconds: Any) -> int:
        """The number of frames for a duration, rounded up. Raises ValueError if not positive."""
        check_number("seconds", seconds, 0, example=10)
        if not seconds:
            raise ValueError(f"seconds={seconds} must be above 0; give a duration, such as 10")
        count: int = ceil(seconds * self.sampling_rate / self.hop)
        return count

    @property
    def streams(self) -> bool:
        """Whether the first samples are final before the last frame, measured.

        False if the whole probe changes, as for a codec that normalises over time (X-codec 2).
        """
        return self.lookahead < PROBE * self.hop

    def measure(self) -> None:
        """Measure what streams need now, instead of in the first of them."""
        if self.streams:
            _ = self.min_frames, self.context

    def final_samples(self, frames: int) -> int:
        """The number of samples of a prefix that later frames do not change; 0 until the end if
        the codec does not stream.
        """
        if not self.streams or frames < self.min_frames:
            return 0
        return max(frames * self.hop - self.lookahead, 0)

    @cached_property
    def lookahead(self) -> int:
        """Trailing samples that later frames change, measured; 0 for causal codecs."""
        return self._count_unstable_samples(PROBE)

    @cached_property
    def min_frames(self) -> int:
        """Frames needed before the first sample is final, measured.

        More than one for a causal codec that pads by reflecting its first frames (Encodec).
        """
        counts = range(1, PROBE)
        return next((n for n in counts if self._count_unstable_samples(n) <= self.lookahead), PROBE)

    @cached_property
    def context(self) -> int | None:
        """Frames that must precede new ones for their samples to be those of the whole decode.

        Measured, one of `CONTEXTS`; None if these are too few, as for an LSTM with a long memory.
        """
        codes, new = torch.cat((self._probe,) * 4, 1), PROBE * self.hop
        whole = self.decode(codes)

        def is_enough(frames: int) -> bool:
            made = self.decode(codes[:, -PROBE - frames :])
            return bool(((made[-new:] - whole[-new:]).abs() <= CHANGED * whole.abs().amax()).all())

        place = bisect_left(CONTEXTS, True, key=is_enough)  # more frames are never too few
        return max(CONTEXTS[place], self.min_frames) if place < len(CONTEXTS) else None

    def _count_unstable_samples(self, frames: int) -> int:
        """Trailing samples of a prefix that differ when more frames follow."""
        short, long = self.decode(self._probe[:, :frames]), self._decoded_probe
        changed = (short - long[: len(short)]).abs() > CHANGED * long.abs().amax()
        return len(short) - int(changed.nonzero()[0]) if bool(changed.any()) else 0

    @cached_property
    def _decoded_probe(self) -> Tensor:  # (S,)
        return self.decode(torch.cat((self._probe, self._probe), 1))

    @property
    def _probe(self) -> Tensor:  # (K, PROBE)
        """Codes spread over the codebooks, the same in every process."""
        steps = torch.arange(self.books * PROBE).view(self.books, PROBE)
        return steps * 7919 % self.size


class CodecStream:
    """The waveform of one utterance whose frames arrive in pieces.

    New frames are decoded after `Codec.context` frames, so the cost of a piece does not grow with
    the utterance; all frames if the codec needs them.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec, self.samples = codec, torch.zeros(0)
        self.whole: tuple[int, Tensor] = (0, torch.zeros(0))  # last decode of all frames

    def extend(self, codes: Tensor, count: int) -> None:  # (K, T)
        """Decode until there are `count` samples of the utterance."""
        hop, done = self.codec.hop, len(self.samples)
        if count <= done:
            return
        past = done // hop
        context = self.codec.context if past > PROBE else None
        start = 0 if context is None else max(past - context, 0)
        if not start:
            self.samples = self.complete(codes)[:count]
            return
        made = self.codec.decode(codes[:, start:])[done - start * hop : count - start * hop]
        self.samples = torch.cat((self.samples, made))

    def complete(self, codes: Tensor) -> Tensor:  # (K, T) -> (S,)
        """The decode of all frames at once, whatever was decoded before."""
        if self.whole[0] != codes.shape[1]:
            self.whole = codes.shape[1], self.codec.decode(codes)
        return self.whole[1]


def load_codec(source: str | Path) -> Codec:
    """Load a codec from a folder or hub name; safetensors only. Raises ValueError if it is none."""
    folder = Path(source)
    if folder.is_dir():
        read_shapes(folder)
    read: Any = AutoModel.from_pretrained
    with explain_load_errors(source, "codec"):
        model = read(str(source), use_safetensors=True, trust_remote_code=False)
    return Codec.of(model.float().eval())
