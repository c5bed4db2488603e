"""Models that read a prompt by one table and draw picture codes by another, behind the same calls.

The head speaks of codes only, and the prompt is not of their vocabulary: in a request its
`input_ids` are `FOREIGN`, which nobody looks up, and what the prompt really says stands beside
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.declared import answered_by
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.readers.backbone import FULL, ROOM, layer_kinds_of
from mmspec.targets.readers.family import Family
from mmspec.targets.readers.reader import Reader, check_kernel
from mmspec.targets.readers.thinned import without_layers
from mmspec.targets.tokens.inputs import padding

FOREIGN = -1  # the id of a prompt token that is no code


@dataclass(frozen=True)
class Tables:
    """How prompt and codes become embeddings, and hidden states logits over codes."""

    decoder: Any  # reads inputs_embeds
    head: Callable[[Tensor], Tensor]  # (..., D) -> (..., K)
    codes: Callable[[Tensor], Tensor]  # (B, q) -> (B, q, D)
    prompt: Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]  # (B, L, D), positions (B, L)
    size: int  # K


class CodeBackbone(Reader):
    """A causal model of picture codes; the calls of `mmspec.targets.readers.backbone.Backbone`.

    Raises ValueError at construction for attention without a mask, and for layers that do not
    attend to everything.
    """

    can_branch = True
    words_prompts = False

    def __init__(self, model: Any, family: Family, config: Any, tables: Tables) -> None:
        self.model, self.family, self.config, self.tables = model, family, config, tables
        self.cache_config, self.head = config, tables.head
        self.decoder, self.stepwise = tables.decoder, set[str]()
        check_kernel(config)
        if layer_kinds_of(config)[0] != (FULL,):
            raise ValueError(f"{type(model).__name__} has layers that do not attend to everything")
        SlotCache(config)  # refuses layers that cannot roll back

    device = answered_by("model.device")

    @property
    def vocabulary(self) -> int:
        return self.tables.size

    @property
    def networks(self) -> Sequence[nn.Module]:
        """A model with several tables: every part that it is made of."""
        parts = [part for child in self.model.children() for part in (child, *child.children())]
        called = [part for part in parts if not isinstance(part, nn.ModuleList)]
        return (self.model, self.decoder, *called)

    def embed(self, tokens: Tensor) -> Tensor:  # (B, q) -> (B, q, D)
        """What the decoder reads for codes."""
        return self.tables.codes(tokens)

    def prefill(self, inputs: Mapping[str, Any], room: int) -> tuple[Memory, Tensor, Any]:
        """Read the prompt, padded on the left; the logits (B, K) are of the first code."""
        embeds, positions = self.tables.prompt(inputs)
        batch, length = embeds.shape[:2]
        mask = inputs.get("attention_mask")
        pads = padding(mask, batch)
        cache = SlotCache(self.cache_config, length + min(room, ROOM))
        cache.plan_uniform(0, length)
        out = self.decoder(
            inputs_embeds=embeds,
            attention_mask=mask if any(pads) else None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        rope = [last + 1 for last in positions[:, -1].expand(batch).tolist()]
        like = torch.empty(0, dtype=embeds.dtype, device=embeds.device)
        memory = Memory(cache, length, pads, rope, like)
        return memory, self.head(out.last_hidden_state[:, -1]), out

    def read(
        self, memory: Memory, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block of codes behind what `memory` keeps; as `Backbone.read`."""
        positions, mask, _ = memory.place(block)
        out = self.decoder(
            inputs_embeds=block.embedded(self.embed),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=memory.cache,
            use_cache=True,
        )
        rows = block.length - max(block.waiting - 1, 0)
        states = out.last_hidden_state[:, -rows:]
        return self.head(states), states if hidden else None

    def thinned(self, skip: Sequence[int], depth: int | None = None) -> CodeBackbone:
        """The same weights with some decoder layers left out; as `Backbone.thinned`."""
        twin = copy.copy(self)
        twin.decoder = without_layers(self.decoder, skip, depth)
        return twin


def foreign(mask: Tensor) -> Tensor:  # (B, L) -> (B, L) int64
    """The `input_ids` of prompts that are not of the codes' vocabulary."""
    return torch.full_like(mask, FOREIGN, dtype=torch.int64)


def counted(mask: Tensor) -> Tensor:  # (B, L) -> (B, L)
    """Positions of left-padded prompts: every row counts its own tokens from 0."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)
