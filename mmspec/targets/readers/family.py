"""What differs between model families, as data that a modality fills in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from mmspec.codes.image_family import ImageFamily
    from mmspec.targets.readers.ctc import CtcHead


@dataclass(frozen=True)
class TowerFeatures:
    """A vision tower that gives one feature per placeholder, before the model's own projector."""

    width: Callable[[Any], int]  # the model's config -> H
    parts: Callable[[Any, Any], Sequence[Tensor]]  # config, tower's output -> (n, H) per picture
    class_layer: Callable[
        [Any], int | None
    ]  # config -> layer whose class token is read; None: none


@dataclass(frozen=True)
class Family:
    """What differs between model families, as far as decoding is concerned."""

    name: str = "text"
    media: tuple[str, ...] = ()  # request keys that carry pictures; empty = text only
    rope_axes: int = 1  # rows of `position_ids`; 3 = M-RoPE
    direct: bool = False  # logits are head(decoder(...)): skip the multimodal wrapper on blocks
    placeholders: tuple[str, ...] = ()  # config names of the ids that stand for visual features
    visual_ids: tuple[str, ...] = ()  # config names of further ids that only frame a picture
    square: bool = False  # a picture's features are the rows of a square
    tower: TowerFeatures | None = None  # None = only what comes behind the model's own projector
    image_family: Callable[[Any], ImageFamily] | None = None  # of a model that draws
    undivided: str | None = None  # name, in the decoder's config, of what its class forgets to
    # divide logits by: greedy decoding does not mind, but every probability would be off
    ctc: CtcHead | None = None  # of a recogniser whose encoder says labels of its own
    writes: bool = True  # speaks text: `generate`
    completed: Callable[[Any, Mapping[str, Any]], dict[str, Any]] | None = None  # model, request ->
    # the same with placeholders, where a processor may leave them out
    only_size: Callable[[Any], tuple[int, int]] | None = None  # config -> rows, columns of pictures

    @property
    def draws(self) -> bool:
        """Whether it speaks picture tokens: `generate_images`."""
        return self.image_family is not None
