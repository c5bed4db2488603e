"""Codecs of transformers: frames of codes become sound.

A codec has K codebooks; a frame is one code of each, and sounds for `hop` samples. Frames that a
codec has decoded cannot be taken back, so only verified ones are decoded, always from the first:
no state of a codec is ever rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from mmspec.errors import check_number, described, reading
from mmspec.models.folder import tensors

PROBE = 24  # frames on which a codec is asked how far it looks ahead
CHANGED = 1e-5  # of the loudest sample: what rounding in another length may change


@dataclass(frozen=True)
class _Facts:
    """Where a family's configuration says what."""

    books: str | int  # codebooks, or the attribute that has their number
    size: Callable[[Any], int]  # codes per book
    rate: str = "sampling_rate"  # samples per second


def _levels(config: Any) -> int:
    size = 1
    for level in config.quantization_levels:
        size *= int(level)
    return size


_FACTS: Mapping[str, _Facts] = {
    "encodec": _Facts("num_quantizers", lambda config: config.codebook_size),
    "mimi": _Facts("num_quantizers", lambda config: config.codebook_size),
    "dac": _Facts("n_codebooks", lambda config: config.codebook_size),
    "xcodec": _Facts("num_quantizers", lambda config: config.codebook_size, "sample_rate"),
    "xcodec2": _Facts(1, _levels),
    "neucodec": _Facts(1, _levels, "output_sampling_rate"),
}


@dataclass(frozen=True, eq=False)
class Codec:
    """A codec, and what is known of it."""

    model: Any
    books: int  # K
    size: int  # codes per book
    sampling_rate: int  # Hz

    @classmethod
    def of(cls, model: Any) -> Codec:
        """Raises ValueError for what is no codec that can be read here."""
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind is None or kind not in _FACTS:
            raise ValueError(
                f"codec={described(model)} is no codec known here; give one of "
                f"{', '.join(_FACTS)} (transformers), or its folder"
            )
        facts, config = _FACTS[kind], model.config
        if getattr(config, "normalize", False) or getattr(config, "chunk_length_s", None):
            raise ValueError(
                f"{type(model).__name__} scales its sound in chunks, and no language model speaks "
                "the scales; give a codec with normalize=False and chunk_length_s=None"
            )
        if getattr(config, "audio_channels", 1) != 1:
            raise ValueError(
                f"{type(model).__name__} decodes {config.audio_channels} channels; give a codec "
                "with one"
            )
        books = facts.books if isinstance(facts.books, int) else getattr(config, facts.books)
        return cls(model, int(books), int(facts.size(config)), int(getattr(config, facts.rate)))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:  # (K, T) int64 -> (S,) float32
        """The sound of one utterance; none of no frames."""
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
        """Samples per frame, as the codec decodes them."""
        return len(self._decoded_probe) // (2 * PROBE)

    def frames(self, seconds: Any) -> int:
        """So many last that long, rounded up. Raises ValueError for what is no positive time."""
        check_number("seconds", seconds, 0, example=10)
        if not seconds:
            raise ValueError(f"seconds={seconds} leaves nothing to say; give a time, such as 10")
        count: int = ceil(seconds * self.sampling_rate / self.hop)
        return count

    def settled(self, frames: int) -> int:
        """Samples of so many frames that further ones would not change.

        None where all of a probe changes, as in a codec that norms over time (X-codec 2).
        """
        if self.lookahead >= PROBE * self.hop or frames < self.least:
            return 0
        return max(frames * self.hop - self.lookahead, 0)

    @cached_property
    def lookahead(self) -> int:
        """Samples at the end that further frames would still change, measured.

        None of causal codecs (Encodec, Mimi).
        """
        return self._changed(PROBE)

    @cached_property
    def least(self) -> int:
        """Frames without which even the first sample is not settled, measured.

        A causal codec that reflects its first frames to pad them (Encodec) needs a few.
        """
        counts = range(1, PROBE)
        return next((n for n in counts if self._changed(n) <= self.lookahead), PROBE)

    def _changed(self, frames: int) -> int:
        """Samples at the end of so many frames that are others when more frames follow."""
        short, long = self.decode(self._probe[:, :frames]), self._decoded_probe
        changed = (short - long[: len(short)]).abs() > CHANGED * long.abs().amax()
        return len(short) - int(changed.nonzero()[0]) if bool(changed.any()) else 0

    @cached_property
    def _decoded_probe(self) -> Tensor:  # (S,)
        return self.decode(torch.cat((self._probe, self._probe), 1))

    @property
    def _probe(self) -> Tensor:  # (K, PROBE)
        """Codes all over the books, the same in every process."""
        steps = torch.arange(self.books * PROBE).view(self.books, PROBE)
        return steps * 7919 % self.size


def load_codec(source: str | Path) -> Codec:
    """A codec from a folder or a hub name; safetensors only. Raises ValueError for what is none."""
    folder = Path(source)
    if folder.is_dir():
        tensors(folder)
    read: Any = AutoModel.from_pretrained
    with reading(source, "codec"):
        model = read(str(source), use_safetensors=True, trust_remote_code=False)
    return Codec.of(model.float().eval())
