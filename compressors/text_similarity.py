"""Keep the visual tokens most similar to a token of the question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Features
from mmspec.compressors.selection import TokenSelection, top_indices


@dataclass(frozen=True)
class TextSimilarity(TokenSelection):
    """The share `keep` by the highest cosine with an embedding of the question's tokens.

    A generic definition, in the input space of the language model, where images and words of the
    same meaning need not be close. keep=1 is the identity.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"text"})

    def select(self, features: Features, signals: Mapping[str, Tensor], count: int) -> Tensor:
        text = functional.normalize(signals["text"].float(), dim=-1)
        visual = functional.normalize(features.values.float(), dim=-1)
        return top_indices((visual @ text.T).amax(-1), count)
