"""The layout of codec codes in the vocabulary of a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.errors import check_number, format_value, is_integer
from mmspec.modalities.speech import LAYOUT
from mmspec.modalities.speech.codecs import Codec
from mmspec.modality import parse_settings


@dataclass(frozen=True)
class SpeechCodes:
    """The ids of codes and special tokens. A sequence is `[voice] text begin`, codes, `end`.

    Stored in `config.json` of a model as the entry "speech_codes":

        {"first": 100, "count": 256, "begin": 98, "end": 99, "voices": {"anna": 96, "ben": 97}}

    Code c of the codec is the id first + c. A model without voices has one unnamed voice.
    """

    first: int
    count: int
    begin: int
    end: int
    voices: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, given: Any) -> SpeechCodes:
        """The layout as given, else of the model's configuration. Raises ValueError for neither.

        `given` is a layout, or a mapping of its fields.
        """
        fields = vars(model.config).get(LAYOUT) if given is None else given
        if fields is None:
            raise ValueError(
                f"the configuration of {type(model).__name__} does not define which ids are codes; "
                f"give codes=SpeechCodes(first, count, begin, end), or add {LAYOUT!r} to it"
            )
        if not isinstance(fields, cls | Mapping):
            raise ValueError(
                f"codes={format_value(fields)} is no SpeechCodes; give one, or its fields"
            )
        found: SpeechCodes = (
            parse_settings(cls, {"voices": {}, **fields}) if isinstance(fields, Mapping) else fields
        )
        found.check(int(model.get_input_embeddings().weight.shape[0]))
        return found

    def check(self, vocabulary: int) -> None:
        """Raises ValueError for ids outside a vocabulary of that size."""
        check_number("count", self.count, 1, whole=True, example=1024)
        last = vocabulary - 1
        named = {"first": self.first, "begin": self.begin, "end": self.end, **self.voices}
        for name, one in named.items():
            if not is_integer(one) or not 0 <= one <= last:
                raise ValueError(f"codes: {name}={one!r} is not an id of 0 to {last}; give one")
        if self.first + self.count > vocabulary:
            raise ValueError(
                f"codes: {self.count} codes from {self.first} do not fit into {vocabulary} ids; "
                "give first and count of the model's own codes"
            )
        if self.first <= self.end < self.first + self.count:
            raise ValueError(f"codes: end={self.end} is a code; give the id that ends speech")

    def check_codec(self, codec: Codec) -> None:
        """Raises ValueError for a codec with other codes."""
        if codec.books != 1:
            raise ValueError(
                f"the codec has {codec.books} codebooks, and the language model predicts one; give "
                "the codec that the model was trained with"
            )
        if codec.size != self.count:
            raise ValueError(
                f"the codec has {codec.size} codes, and the language model predicts {self.count}; "
                "give the codec that the model was trained with"
            )

    def suppressed_ids(self, vocabulary: int) -> list[int]:
        """All ids except codes and `end`, which speech never contains."""
        last = self.first + self.count
        return [
            one for one in range(vocabulary) if not self.first <= one < last and one != self.end
        ]

    def voice_id(self, name: str | None) -> int | None:
        """The id of a voice, by default the first. Raises ValueError for an unknown name."""
        if name is None:
            return next(iter(self.voices.values()), None)
        if not isinstance(name, str) or name not in self.voices:
            known = ", ".join(self.voices) or "none; drop it"
            raise ValueError(f"voice={name!r} is not known; choose one of {known}")
        return self.voices[name]


@dataclass(frozen=True)
class FlatFrames:
    """Frames of one code each, up to the end id."""

    layout: SpeechCodes
    max_tokens: int  # new tokens
    latest: ClassVar[int] = 0

    def codes(self, tokens: Sequence[int]) -> Tensor:  # (1, T) int64
        ids = torch.tensor(tokens[: self.count_frames(tokens)], dtype=torch.int64)
        return (ids - self.layout.first)[None]

    def count_frames(self, tokens: Sequence[int]) -> int:
        return len(tokens) - self._has_ended(tokens)

    def is_over(self, tokens: Sequence[int]) -> bool:
        return len(tokens) >= self.max_tokens or self._has_ended(tokens)

    def _has_ended(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and tokens[-1] == self.layout.end
