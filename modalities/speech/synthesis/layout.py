"""Where speech stands in the vocabulary of a language model that has text in it, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.errors import check_number, described, is_whole
from mmspec.modalities.speech.codecs import Codec
from mmspec.modalities.speech.synthesis import LAYOUT
from mmspec.modality import parse_settings


@dataclass(frozen=True)
class SpeechCodes:
    """Which ids are codes, and what a prompt is made of: `[voice] text begin`, then codes, `end`.

    In `config.json` of a model it is the entry "speech_codes":

        {"first": 100, "count": 256, "begin": 98, "end": 99, "voices": {"anna": 96, "ben": 97}}

    Code c of the codec is the id first + c. A model without voices has one that is not named.
    """

    first: int
    count: int
    begin: int
    end: int
    voices: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, given: Any) -> SpeechCodes:
        """As it was given, or as the model's configuration says. Raises ValueError for neither.

        `given` is one, or a mapping of its fields.
        """
        said = vars(model.config).get(LAYOUT) if given is None else given
        if said is None:
            raise ValueError(
                f"{type(model).__name__} does not say which of its ids are codes of speech; give "
                f"codes=SpeechCodes(first, count, begin, end), or put {LAYOUT!r} into its config"
            )
        if not isinstance(said, cls | Mapping):
            raise ValueError(f"codes={described(said)} is no SpeechCodes; give one, or its fields")
        found: SpeechCodes = (
            parse_settings(cls, {"voices": {}, **said}) if isinstance(said, Mapping) else said
        )
        found.check(int(model.get_input_embeddings().weight.shape[0]))
        return found

    def check(self, vocabulary: int) -> None:
        """Refuse ids that a vocabulary of that size has not got. Raises ValueError."""
        check_number("count", self.count, 1, whole=True, example=1024)
        last = vocabulary - 1
        named = {"first": self.first, "begin": self.begin, "end": self.end, **self.voices}
        for name, one in named.items():
            if not is_whole(one) or not 0 <= one <= last:
                raise ValueError(f"codes: {name}={one!r} is no id of 0 to {last}; give one")
        if self.first + self.count > vocabulary:
            raise ValueError(
                f"codes: {self.count} codes from {self.first} on do not fit into {vocabulary} ids; "
                "give first and count of the model's own codes"
            )
        if self.first <= self.end < self.first + self.count:
            raise ValueError(f"codes: end={self.end} is a code, too; give the id behind speech")

    def fit(self, codec: Codec) -> None:
        """Refuse a codec of other codes. Raises ValueError."""
        if codec.books != 1:
            raise ValueError(
                f"the codec has {codec.books} codebooks, and the language model speaks one; give "
                "the codec that the model was trained with"
            )
        if codec.size != self.count:
            raise ValueError(
                f"the codec has {codec.size} codes, and the language model speaks {self.count}; "
                "give the codec that the model was trained with"
            )

    def others(self, vocabulary: int) -> list[int]:
        """All ids that speech has none of; a model must not say them."""
        last = self.first + self.count
        return [
            one for one in range(vocabulary) if not self.first <= one < last and one != self.end
        ]

    def voice(self, name: str | None) -> int | None:
        """The id of a speaker; the first one where none is named. Raises ValueError."""
        if name is None:
            return next(iter(self.voices.values()), None)
        if not isinstance(name, str) or name not in self.voices:
            known = ", ".join(self.voices) or "none; leave it out"
            raise ValueError(f"voice={name!r} is not known; choose one of {known}")
        return self.voices[name]


@dataclass(frozen=True)
class FlatFrames:
    """Frames of one code each, up to the id that ends speech."""

    layout: SpeechCodes
    most: int  # new tokens
    latest: ClassVar[int] = 0

    def codes(self, tokens: Sequence[int]) -> Tensor:  # (1, T) int64
        ids = torch.tensor(tokens[: self.whole(tokens)], dtype=torch.int64)
        return (ids - self.layout.first)[None]

    def whole(self, tokens: Sequence[int]) -> int:
        return len(tokens) - self._has_ended(tokens)

    def is_over(self, tokens: Sequence[int]) -> bool:
        return len(tokens) >= self.most or self._has_ended(tokens)

    def _has_ended(self, tokens: Sequence[int]) -> bool:
        return bool(tokens) and tokens[-1] == self.layout.end
