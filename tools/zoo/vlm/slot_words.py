"""What a slot of a clip shows, in the words of the text model that is to tell of it.

A tower that shows things in these vectors speaks the text model's language: the words of a question
are like the slots that they are about, and a slot that is looked at has the words of the answer in
it. Without them a text model spends most of its lessons on finding out which features are "red".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.zoo.moving import DIRECTIONS
from mmspec.zoo.scene import BOARD, COLOURS, DIGITS, SHAPES, SIZES

_SHARPNESS = 6.0  # of the distribution of a class, in squared lengths of its vectors
_NOTHING = 3.0  # how much likelier nothing is, whose vector says nothing
_NAMED = 0.3  # weight of what can be told apart beside what is shown


@dataclass(frozen=True)
class SlotWords:
    """Vectors (n, D) of every name, colour, size, way and place; the first of each is of nothing.

    Names, colours and sizes are the embeddings of their words. Ways and places have vectors of
    their own: a thing at the left does not look as if it moved left.
    """

    tables: tuple[Tensor, ...]

    @staticmethod
    def of(model: Any, tokenizer: Any) -> SlotWords:
        """Those of a text model, as its embeddings are now."""
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
        return SlotWords((*worded, ways, places[: 1 + BOARD**2]))

    def shown(self, story: Tensor) -> Tensor:  # (.., n) as `sights` has it -> (.., D)
        """What slots show: the sum of all that is true of them."""
        return torch.stack([t[story[..., i]] for i, t in enumerate(self.tables)]).sum(0)

    def loss(self, features: Tensor, story: Tensor) -> Tensor:  # (.., D), (.., n) -> ()
        """How far features are from what is true, and how little they tell it from what is not.

        Half of it is over slots with things.
        """
        away = (features - self.shown(story)).square().sum(-1)
        size = sum(table[1:].square().sum(-1).mean() for table in self.tables)
        return _balanced(away, story) / size + _NAMED * self._unclear(features, story)

    def _unclear(self, features: Tensor, story: Tensor) -> Tensor:
        losses = []
        for table, true in zip(self.tables, story.unbind(-1), strict=False):
            distribution = features @ table.T * (_SHARPNESS / table[1:].square().sum(-1).mean())
            distribution = distribution + _NOTHING * (table == 0).all(-1)
            each = functional.cross_entropy(
                distribution.flatten(0, -2), true.flatten(), reduction="none"
            )
            losses.append(_balanced(each.view(true.shape), story))
        return torch.stack(losses).mean()


def _balanced(each: Tensor, story: Tensor) -> Tensor:
    """The mean over slots with things, and over those without, in equal parts."""
    is_there = story[..., 0] > 0
    return (each[is_there].mean() + each[~is_there].mean()) / 2
