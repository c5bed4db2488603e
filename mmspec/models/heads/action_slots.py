"""Action slots: predict all tokens of an action in one parallel forward.

OpenVLA-OFT (Kim et al. 2025) appends an empty slot for every action token to the prompt, with
bidirectional attention among them, and decodes all in one forward. Here a small head does so on the
target's hidden states of the prompt; slots of known tokens hold their embeddings:

    inputs    state state .. state | y0   y1   ?    ?    ?      y0 y1 known, the others open
    outputs                          -    -    y2   y3   y4     by the target's output head

Layers are Llama's, without a causal mask. Embedding table and output head are the target's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from mmspec.models.heads.state_head import StateHeadConfig
from mmspec.models.llama_layers import LlamaHead


class ActionSlotsConfig(StateHeadConfig):
    """`hidden_size` and `vocab_size` are the target's; an action has `num_slots` tokens.

    Slots read the last states of a whole prompt, so `StateHeadConfig`'s own fields must keep their
    defaults. Raises ValueError otherwise, and for no slots.
    """

    model_type = "action_slots"
    supported_choices: ClassVar[frozenset[str]] = frozenset()

    num_hidden_layers: int = 1
    bias: bool = True
    num_slots: int = 7

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if self.num_slots < 1:
            raise ValueError(f"num_slots={self.num_slots} must be at least 1")


class ActionSlots(LlamaHead):
    """Maps states of a prompt, and known tokens, to states of the open slots."""

    config: ActionSlotsConfig
    config_class = ActionSlotsConfig

    def __init__(self, config: ActionSlotsConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.slots = nn.Parameter(torch.zeros(config.num_slots, width))  # position in the action
        self.open = nn.Parameter(torch.zeros(width))  # embedding of open slots
        count = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, layer) for layer in count)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, ActionSlots):
            nn.init.normal_(module.slots, std=self.config.initializer_range)
            nn.init.normal_(module.open, std=self.config.initializer_range)

    def forward(self, states: Tensor, embeds: Tensor, known: Tensor, seen: Tensor) -> Tensor:
        """States (B, S, D) for the output head, one per slot; those of known slots have no meaning.

        `states` (B, L, D) are the target's of the prompt, with False in `seen` (B, L) for padding;
        `embeds` (B, S, D) are of the tokens that are `known` (B, S).
        """
        count = self.config.num_slots
        filled = torch.where(known[..., None], embeds, self.open)
        last = states[:, -1:].expand(-1, count, -1)
        slots = self.fc(torch.cat((filled, last), -1)) + self.slots
        seen = torch.cat((seen, seen.new_ones(len(seen), count)), 1)
        hidden = torch.finfo(states.dtype).min
        mask = torch.zeros(seen.shape, dtype=states.dtype, device=seen.device)
        mask = mask.masked_fill(~seen, hidden)[:, None, None].expand(-1, 1, seen.shape[1], -1)
        positions = (seen.long().cumsum(-1) - 1).clamp_min(0)
        out = self.run_layers(self.layers, torch.cat((states, slots), 1), mask, positions)
        return out[:, -count:]


def count_slots(config: Any) -> int:
    """Number of tokens of a policy's longest action; 7 (OpenVLA) for other models."""
    fields = vars(config)
    sizes = [len(one["action"]["q01"]) for one in (fields.get("norm_stats") or {}).values()]
    return max(sizes, default=7) * int(fields.get("num_actions_chunk") or 1)
