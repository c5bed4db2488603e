"""Readers of models with one embedding table for the prompt and another for image tokens.

The head predicts image tokens only, and the prompt is not of their vocabulary: in a request its
`input_ids` are `FOREIGN`, which are never embedded, and the prompt is given by other inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec import _hf
from mmspec._attributes import delegate_to
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.readers.backbone import FULL, MAX_RESERVED_SLOTS, layer_kinds_of
from mmspec.targets.readers.reader import Family, Reader, check_kernel, without_layers
from mmspec.targets.tokens.context import count_padding

FOREIGN = -1  # the id of a prompt token that is no image token


@dataclass(frozen=True)
class Tables:
    """Embeddings of prompt and image tokens, and the head over image tokens."""

    decoder: Any  # reads inputs_embeds
    head: Callable[[Tensor], Tensor]  # (..., D) -> (..., K)
    codes: Callable[[Tensor], Tensor]  # (B, q) -> (B, q, D)
    prompt: Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]  # (B, L, D), positions (B, L)
    size: int  # K


class CodeBackbone(Reader):
    """A causal model of image tokens; the calls of `mmspec.targets.readers.backbone.Backbone`.

    Raises ValueError at construction for attention without a mask, and for layers without full
    attention.
    """

    can_branch = True
    has_token_prompts = False

    def __init__(self, model: Any, family: Family, config: Any, tables: Tables) -> None:
        self.model, self.family, self.config, self.tables = model, family, config, tables
        self.cache_config, self.head = config, tables.head
        self.decoder, self.stepwise = tables.decoder, set[str]()
        self.cache_name = _hf.cache_name(tables.decoder)
        check_kernel(config)
        if layer_kinds_of(config)[0] != (FULL,):
            raise ValueError(f"{type(model).__name__} has layers that do not attend to everything")
        SlotCache(config)  # raises for layers that cannot roll back

    device = delegate_to("model.device")

    @property
    def vocabulary(self) -> int:
        return self.tables.size

    @property
    def networks(self) -> Sequence[nn.Module]:
        """The model and all its parts."""
        parts = [part for child in self.model.children() for part in (child, *child.children())]
        called = [part for part in parts if not isinstance(part, nn.ModuleList)]
        return (self.model, self.decoder, *called)

    def embed(self, tokens: Tensor) -> Tensor:  # (B, q) -> (B, q, D)
        """Input embeddings of image tokens."""
        return self.tables.codes(tokens)

    def prefill(self, inputs: Mapping[str, Any], extra_slots: int) -> tuple[Memory, Tensor, Any]:
        """Read the prompt, padded on the left; the logits (B, K) are of the first image token."""
        embeds, positions = self.tables.prompt(inputs)
        batch, length = embeds.shape[:2]
        mask = inputs.get("attention_mask")
        pads = count_padding(mask, batch)
        cache = SlotCache(self.cache_config, length + min(extra_slots, MAX_RESERVED_SLOTS))
        cache.plan_uniform(0, length)
        out = self.decoder(
            inputs_embeds=embeds,
            attention_mask=mask if any(pads) else None,
            position_ids=positions,
            use_cache=True,
            **{self.cache_name: cache},
        )
        rope = [last + 1 for last in positions[:, -1].expand(batch).tolist()]
        like = torch.empty(0, dtype=embeds.dtype, device=embeds.device)
        memory = Memory(cache, length, pads, rope, like)
        return memory, self.head(out.last_hidden_state[:, -1]), out

    def read(
        self, memory: Memory, block: TokenBlock, hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Read a block of image tokens; as `Backbone.read`."""
        positions, mask, _ = memory.place(block)
        out = self.decoder(
            inputs_embeds=block.embed_tokens(self.embed),
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self.cache_name: memory.cache},
        )
        rows = block.length - max(block.waiting - 1, 0)
        states = out.last_hidden_state[:, -rows:]
        return self.head(states), states if hidden else None

    def skip_layers(self, skip: Sequence[int], depth: int | None = None) -> CodeBackbone:
        """The same weights without some decoder layers; as `Backbone.skip_layers`."""
        twin = copy.copy(self)
        twin.decoder = without_layers(self.decoder, skip, depth)
        return twin


def make_foreign_ids(mask: Tensor) -> Tensor:  # (B, L) -> (B, L) int64
    """The `input_ids` of prompts that are not of the image vocabulary."""
    return torch.full_like(mask, FOREIGN, dtype=torch.int64)


def count_positions(mask: Tensor) -> Tensor:  # (B, L) -> (B, L)
    """Position ids of left-padded prompts: every row counts its tokens from 0."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)
