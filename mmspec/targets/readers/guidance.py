"""Classifier-free guidance as one doubled batch that nobody else notices.

The target and a draft model read B rows; behind `Guided` every forward reads 2B, first the prompts,
then the unconditional prompts, and gives back B rows of guided logits. Both branches keep the same
new tokens. Prompts of different lengths are padded on the left to a common one:

    inputs     a  b  c          negative  x        both   a  b  c      memory   kept = 3, not 6 rows
               -  d  e                    x               -  d  e
                                                          -  -  x
                                                          -  -  x
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.declared import answered_by
from mmspec.distributions.sampling import guide
from mmspec.targets.memory import Memory, RowMemories, TokenBlock
from mmspec.targets.readers.reader import Reader

SCALE, NEGATIVE = "guidance_scale", "negative"  # what a guided request has among its inputs


class Guided(Reader):
    """A backbone whose logits are guided where a request asks for it; otherwise the backbone.

    A request asks by two more inputs: `guidance_scale`, and `negative`, the inputs of the
    unconditional prompts (B rows as well). A scale of 1 reads no second branch. Draft models given
    the same inputs are guided alike, so that p and q are distributions of the same kind.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.model, self.family, self.config = reader.model, reader.family, reader.config
        self.cache_config, self.can_branch = reader.cache_config, reader.can_branch
        self.words_prompts = reader.words_prompts
        self.obstacle, self.stepwise = reader.obstacle, reader.stepwise
        self.decoder, self.head = reader.decoder, reader.head
        self.window, self.bare = reader.window, reader.bare

    device = answered_by("reader.device")

    @property
    def vocabulary(self) -> int:
        return int(self.reader.vocabulary)

    networks = answered_by("reader.networks")

    def embed(self, tokens: Tensor) -> Tensor:  # (B, q) -> (B, q, D)
        """What the decoder reads for tokens, of any number of branches."""
        embeds: Tensor = self.reader.embed(tokens)
        return embeds

    def prefill(self, inputs: Mapping[str, Any], room: int) -> tuple[Any, Tensor, Any]:
        """Read both prompts; as `Backbone.prefill`.

        Raises ValueError for a scale without unconditional prompts, and for prompts that cannot be
        put into one batch.
        """
        own = {name: value for name, value in inputs.items() if name not in (SCALE, NEGATIVE)}
        scale, negative = scale_of(inputs), inputs.get(NEGATIVE)
        if scale == 1:
            memory, logits, out = self.reader.prefill(own, room)
            return memory, logits, out
        if negative is None:
            raise ValueError(
                f"{SCALE}={scale} needs an unconditional prompt, but the request has none; give "
                f"{NEGATIVE}= its inputs, or {SCALE}=1"
            )
        both, shift = joined(own, negative)
        memory, logits, out = self.reader.prefill(both, room)
        return GuidedMemory(memory, shift, scale), guided(logits, scale), out

    def read(
        self, memory: Memory | RowMemories | GuidedMemory, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block behind both prompts; as `Backbone.read`, hidden states (2B, ...) of both."""
        if not isinstance(memory, GuidedMemory):
            logits, states = self.reader.read(memory, block, hidden)
            return logits, states
        logits, states = self.reader.read(memory.both, block.tiled(2), hidden)
        return guided(logits, memory.scale), states

    def thinned(self, skip: Sequence[int], depth: int | None = None) -> Guided:
        """The same weights with some layers left out; as `Backbone.thinned`."""
        return Guided(self.reader.thinned(skip, depth))


class GuidedMemory:
    """The memory of both branches, with the face of the first one's."""

    def __init__(self, both: Memory | RowMemories, shift: int, scale: float) -> None:
        self.both, self.shift, self.scale = both, shift, scale

    @property
    def batch(self) -> int:
        return self.both.batch // 2

    @property
    def kept(self) -> list[int]:
        """Slots per row, less those that only fill up to a longer unconditional prompt."""
        return [slots - self.shift for slots in self.both.kept[: self.batch]]

    @property
    def padding(self) -> tuple[int, ...]:
        """Slots that nobody sees, for the 2B rows of both branches."""
        return self.both.padding

    like = answered_by("both.like")
    saved = answered_by("both.saved")

    def advance(self, steps: Sequence[int]) -> None:
        self.both.advance([*steps, *steps])

    def commit(
        self, waiting: Sequence[int], paths: Sequence[Sequence[int]], nodes: int
    ) -> list[int]:
        """Keep the same tokens in both branches; as `Memory.commit`."""
        return self.both.commit([*waiting, *waiting], [*paths, *paths], nodes)[: self.batch]


def scale_of(inputs: Mapping[str, Any]) -> float:
    """The guidance scale of a request; 1 = one branch only."""
    return float(inputs.get(SCALE, 1.0))


def joined(inputs: Mapping[str, Any], negative: Mapping[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Both prompts as one batch (2B rows), and by how many slots the first moved to the right.

    Tensors are (B, L, ...) and are padded on the left, behind an `attention_mask`.
    """
    sides = [_masked(inputs), _masked(negative)]
    names = set(sides[0])
    if names != set(sides[1]):
        raise ValueError(
            f"the prompt has {sorted(names)}, but the unconditional prompt has "
            f"{sorted(sides[1])}; give both the same inputs (pictures cannot be guided here)"
        )
    rows = [len(side["attention_mask"]) for side in sides]
    if rows[0] != rows[1]:
        raise ValueError(f"{rows[0]} prompts have {rows[1]} unconditional ones; give one for each")
    widths = [side["attention_mask"].shape[1] for side in sides]
    width = max(widths)
    both = {name: torch.cat([_left(side[name], width) for side in sides]) for name in sides[0]}
    return both, width - widths[0]


def guided(logits: Tensor, scale: float) -> Tensor:  # (2B, ..., V) -> (B, ..., V)
    """Logits of both branches as one, log-probabilities first, as `generate()` combines them.

    The distribution is that of raw logits; a penalty that goes by the sign of a score sees the same
    scores.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    cond, uncond = logits.log_softmax(-1, dtype=wide).chunk(2)
    return guide(cond, uncond, scale)


def _masked(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    given = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if given.get("attention_mask") is None:
        carrier = next(iter(given.values()))
        shape = carrier.shape[:2]
        given["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=carrier.device)
    return given


def _left(value: Tensor, width: int) -> Tensor:  # (B, L, ...) -> (B, width, ...)
    after = [0, 0] * (value.dim() - 2)
    return functional.pad(value, [*after, width - value.shape[1], 0])
