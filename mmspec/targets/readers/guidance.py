"""Classifier-free guidance by a doubled batch inside a reader.

Target and draft model read B rows; inside `Guided` every forward reads 2B, first the prompts, then
the unconditional prompts, and returns B rows of guided logits. Both branches get the same new
tokens. Prompts of different lengths are padded on the left to a common one:

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

from mmspec._attributes import delegate_to
from mmspec.distributions.sampling import guide
from mmspec.targets.memory import Memory, RowMemories, TokenBlock
from mmspec.targets.readers.reader import Reader

SCALE, NEGATIVE = "guidance_scale", "negative"  # inputs of a guided request


class Guided(Reader):
    """A reader with guided logits, if the request has guidance.

    Two more inputs of a request: `guidance_scale`, and `negative`, the inputs of the unconditional
    prompts (B rows as well). With a scale of 1 there is no second branch. Draft models with the
    same inputs are guided in the same way, so that p and q are comparable.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.model, self.family, self.config = reader.model, reader.family, reader.config
        self.cache_config, self.can_branch = reader.cache_config, reader.can_branch
        self.can_fork, self.has_token_prompts = reader.can_fork, reader.has_token_prompts
        self.obstacle, self.stepwise = reader.obstacle, reader.stepwise
        self.decoder, self.head = reader.decoder, reader.head
        self.window, self.is_maskless = reader.window, reader.is_maskless

    device = delegate_to("reader.device")

    @property
    def vocabulary(self) -> int:
        return int(self.reader.vocabulary)

    networks = delegate_to("reader.networks")

    def embed(self, tokens: Tensor) -> Tensor:  # (B, q) -> (B, q, D)
        """Input embeddings of tokens, of any number of branches."""
        embeds: Tensor = self.reader.embed(tokens)
        return embeds

    def prefill(self, inputs: Mapping[str, Any], extra_slots: int) -> tuple[Any, Tensor, Any]:
        """Read both prompts; as `Backbone.prefill`.

        Raises ValueError for a scale without unconditional prompts, and for prompts that cannot be
        batched.
        """
        own = {name: value for name, value in inputs.items() if name not in (SCALE, NEGATIVE)}
        scale, negative = guidance_scale(inputs), inputs.get(NEGATIVE)
        if scale == 1:
            memory, logits, out = self.reader.prefill(own, extra_slots)
            return memory, logits, out
        if negative is None:
            raise ValueError(
                f"{SCALE}={scale} needs an unconditional prompt, but the request has none; give "
                f"{NEGATIVE}= its inputs, or {SCALE}=1"
            )
        both, shift = join_prompts(own, negative)
        memory, logits, out = self.reader.prefill(both, extra_slots)
        return GuidedMemory(memory, shift, scale), guide_logits(logits, scale), out

    def read(
        self, memory: Memory | RowMemories | GuidedMemory, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block after both prompts; as `Backbone.read`, with hidden states (2B, ...)."""
        if not isinstance(memory, GuidedMemory):
            logits, states = self.reader.read(memory, block, hidden)
            return logits, states
        logits, states = self.reader.read(memory.both, block.repeat_batch(2), hidden)
        return guide_logits(logits, memory.scale), states

    def skip_layers(self, skip: Sequence[int], depth: int | None = None) -> Guided:
        """The same weights without some layers; as `Backbone.skip_layers`."""
        return Guided(self.reader.skip_layers(skip, depth))


class GuidedMemory:
    """The memory of both branches, with the interface of the first one's."""

    def __init__(self, both: Memory | RowMemories, shift: int, scale: float) -> None:
        self.both, self.shift, self.scale = both, shift, scale

    @property
    def batch(self) -> int:
        return self.both.batch // 2

    @property
    def lengths(self) -> list[int]:
        """Slots per row, without the padding to a longer unconditional prompt."""
        return [slots - self.shift for slots in self.both.lengths[: self.batch]]

    @property
    def padding(self) -> tuple[int, ...]:
        """Masked slots of the 2B rows of both branches."""
        return self.both.padding

    like = delegate_to("both.like")
    saved_state = delegate_to("both.saved_state")

    def advance(self, steps: Sequence[int]) -> None:
        self.both.advance([*steps, *steps])

    def commit(
        self, waiting: Sequence[int], paths: Sequence[Sequence[int]], nodes: int
    ) -> list[int]:
        """Commit the same tokens in both branches; as `Memory.commit`."""
        return self.both.commit([*waiting, *waiting], [*paths, *paths], nodes)[: self.batch]


def guidance_scale(inputs: Mapping[str, Any]) -> float:
    """The guidance scale of a request; 1 = one branch only."""
    return float(inputs.get(SCALE, 1.0))


def join_prompts(
    inputs: Mapping[str, Any], negative: Mapping[str, Any]
) -> tuple[dict[str, Tensor], int]:
    """Join both prompts to one batch (2B rows); also return the left padding added to the first.

    Tensors are (B, L, ...) and are padded on the left, with an `attention_mask`.
    """
    sides = [_add_mask(inputs), _add_mask(negative)]
    names = set(sides[0])
    if names != set(sides[1]):
        raise ValueError(
            f"the prompt has {sorted(names)}, but the unconditional prompt has "
            f"{sorted(sides[1])}; give both the same inputs (images cannot be guided here)"
        )
    rows = [len(side["attention_mask"]) for side in sides]
    if rows[0] != rows[1]:
        raise ValueError(f"{rows[0]} prompts have {rows[1]} unconditional ones; give one for each")
    widths = [side["attention_mask"].shape[1] for side in sides]
    width = max(widths)
    both = {name: torch.cat([_pad_left(side[name], width) for side in sides]) for name in sides[0]}
    return both, width - widths[0]


def guide_logits(logits: Tensor, scale: float) -> Tensor:  # (2B, ..., V) -> (B, ..., V)
    """Combine the logits of both branches by log-probabilities, as in `generate()`.

    Penalties that depend on the sign of a score get the same scores as in `generate()`.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    cond, uncond = logits.log_softmax(-1, dtype=wide).chunk(2)
    return guide(cond, uncond, scale)


def _add_mask(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    given = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if given.get("attention_mask") is None:
        carrier = next(iter(given.values()))
        shape = carrier.shape[:2]
        given["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=carrier.device)
    return given


def _pad_left(value: Tensor, width: int) -> Tensor:  # (B, L, ...) -> (B, width, ...)
    after = [0, 0] * (value.dim() - 2)
    return functional.pad(value, [*after, width - value.shape[1], 0])
