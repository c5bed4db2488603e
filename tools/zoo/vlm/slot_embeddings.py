"""Target features of the vision tower for clips, made of token embeddings of the text model.

With such features the tokens of a question are similar to the slots that they refer to, and an
attended slot contains the tokens of the answer. Without them the text model spends most of its
training on learning which features mean "red".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.zoo.motion import DIRECTIONS
from mmspec.zoo.scene import BOARD, COLOURS, DIGITS, SHAPES, SIZES

_SHARPNESS = 6.0  # inverse temperature of the class logits, in squared lengths of the vectors
_NOTHING = 3.0  # bias of class 0, whose vector is zero
_CLASS_WEIGHT = 0.3  # of the classification loss


@dataclass(frozen=True)
class SlotEmbeddings:
    """Vectors (n, D) of every name, colour, size, direction and place; index 0 is zero.

    Names, colours and sizes have their token embeddings. Directions and places have orthogonal
    vectors of their own, since "left" is both a place and a direction.
    """

    tables: tuple[Tensor, ...]

    @staticmethod
    def from_model(model: Any, tokenizer: Any) -> SlotEmbeddings:
        """Make the vectors from the current embeddings of a text model."""
        weight = model.get_input_embeddings().weight.detach()
        width = weight.shape[1]

        def word(text: str) -> Tensor:
            ids = tokenizer.convert_tokens_to_ids(text.split())
            found: Tensor = weight[ids].sum(0)
            return found

        names = [*SHAPES, *(f"digit {digit}" for digit in DIGITS)]
        worded = [torch.stack([weight.new_zeros(width), *map(word, some)])
                  for some in (names, COLOURS, SIZES)]  # fmt: skip
        own = torch.linalg.qr(torch.randn(width, width))[0] * weight.std() * math.sqrt(width)
        ways, places = own.split((len(DIRECTIONS), width - len(DIRECTIONS)))
        ways = torch.cat((torch.zeros_like(own[:1]), ways))
        return SlotEmbeddings((*worded, ways, places[: 1 + BOARD**2]))

    def embed(self, story: Tensor) -> Tensor:  # (.., n), see `slot_labels` -> (.., D)
        """Return the target features of slots: the sum of the vectors of their labels."""
        return torch.stack([t[story[..., i]] for i, t in enumerate(self.tables)]).sum(0)

    def loss(self, features: Tensor, story: Tensor) -> Tensor:  # (.., D), (.., n) -> ()
        """Return the squared error of features plus the weighted classification loss.

        Slots with and without things have equal weight.
        """
        away = (features - self.embed(story)).square().sum(-1)
        size = sum(table[1:].square().sum(-1).mean() for table in self.tables)
        return _balanced_mean(away, story) / size + _CLASS_WEIGHT * self._classification_loss(
            features, story
        )

    def _classification_loss(self, features: Tensor, story: Tensor) -> Tensor:
        losses = []
        for table, true in zip(self.tables, story.unbind(-1), strict=False):
            distribution = features @ table.T * (_SHARPNESS / table[1:].square().sum(-1).mean())
            distribution = distribution + _NOTHING * (table == 0).all(-1)
            each = functional.cross_entropy(
                distribution.flatten(0, -2), true.flatten(), reduction="none"
            )
            losses.append(_balanced_mean(each.view(true.shape), story))
        return torch.stack(losses).mean()


def _balanced_mean(each: Tensor, story: Tensor) -> Tensor:
    """Return the average of the mean over slots with things and the mean over the others."""
    is_there = story[..., 0] > 0
    return (each[is_there].mean() + each[~is_there].mean()) / 2
