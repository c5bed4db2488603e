"""Keep the visual tokens that are most like a word of the question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import KeptTokens, best


@dataclass(frozen=True)
class TextSimilarity(KeptTokens):
    """The share `keep` by the highest cosine with an embedding of the question's tokens.

    A generic definition. The space is that in which the language model reads both, where pictures
    and words of one meaning need not be near. keep=1 is the identity.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"text"})

    def kept(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        text = functional.normalize(signals["text"].float(), dim=-1)
        seen = functional.normalize(features.values.float(), dim=-1)
        return best((seen @ text.T).amax(-1), count)
