"""Action slots: all tokens of an answer in one pass, beside the target that says them one by one.

OpenVLA-OFT (Kim et al. 2025) puts an empty place for every token of an action behind the prompt,
lets all see each other, and reads the tokens off in a single forward. Here a small head does so,
on the states that the target has of the prompt; places of tokens that are said already hold them:

    reads     state state .. state | y0   y1   ?    ?    ?      y0 y1 said, the others open
    says                             -    -    y2   y3   y4     by the target's own output head

Layers are Llama's, without a causal mask. The embedding table and the output head are the target's
and are not kept here.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from mmspec.models.heads.state_head import StateHeadConfig
from mmspec.models.llama_layers import LlamaHead


class ActionSlotsConfig(StateHeadConfig):
    """`hidden_size` and `vocab_size` are the target's; `num_slots` tokens make an answer.

    Slots read the last states of a whole prompt, so of `StateHeadConfig`'s own fields none may be
    changed. Raises ValueError for one that is, and for no slots.
    """

    model_type = "action_slots"
    chooses: ClassVar[frozenset[str]] = frozenset()

    num_hidden_layers: int = 1
    bias: bool = True
    num_slots: int = 7

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if self.num_slots < 1:
            raise ValueError(f"num_slots={self.num_slots} is no answer; give 1 or more")


class ActionSlots(LlamaHead):
    """States of a prompt, and the tokens said so far, to states of the tokens to come."""

    config: ActionSlotsConfig
    config_class = ActionSlotsConfig

    def __init__(self, config: ActionSlotsConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.slots = nn.Parameter(torch.zeros(config.num_slots, width))  # which place it is
        self.open = nn.Parameter(torch.zeros(width))  # in the place of a token's embedding
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
        """States (B, S, D) that lead to the token of every slot; those of known ones say nothing.

        `states` (B, L, D) are the target's of the prompt, False in `seen` (B, L) padding;
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
        places = (seen.long().cumsum(-1) - 1).clamp_min(0)
        out = self.behind(self.layers, torch.cat((states, slots), 1), mask, places)
        return out[:, -count:]


def slots_of(config: Any) -> int:
    """Tokens of the longest answer of a policy; OpenVLA's seven for what is none."""
    facts = vars(config)
    sizes = [len(one["action"]["q01"]) for one in (facts.get("norm_stats") or {}).values()]
    return max(sizes, default=7) * int(facts.get("num_actions_chunk") or 1)
