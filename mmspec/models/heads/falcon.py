"""The Falcon head: an LSTM and one layer that predict the states of the next K tokens in one run.

Gao et al. 2024, "Falcon: faster and parallel inference of large language models through enhanced
semi-autoregressive drafting and custom-designed decoding tree". It reads what a feature head reads.
Slot t predicts the state of K tokens later, so the last K slots predict a block of K tokens:

    slot        b|a   c|b  [d|c   e|d]        token t + 1 | state of token t, K = 2
    predicts                 e'    f'         states of tokens e and f, and so tokens f and g

An LSTM runs over the slots; then a decoder layer attends with a relaxed causal mask: a slot of a
block also attends to the later ones of its block. The next block reads the drafted tokens with the
states predicted for them. Embedding table and output head are the target's. Reconstructed: how
slots predict (as in semi-autoregressive transformers, Wang et al. 2018), and the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mmspec.errors import check_number
from mmspec.models.heads.state_head import (
    ALL_FUSED,
    SlotMarks,
    SlotRotaryEmbedding,
    StateHead,
    StateHeadConfig,
)
from mmspec.models.llama_layers import Layers

MAX_BLOCK, MAX_LAYERS = 64, 8
Carry = tuple[Tensor, Tensor]  # hidden and cell states of the LSTM, (layers, n, D) each


class FalconHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; `block` tokens are predicted at once, by `lstm_layers` of an LSTM."""

    model_type = "falcon_head"
    supported_choices: ClassVar[frozenset[str]] = frozenset(
        ("visual_slots", "positions", "visual_keep")
    )
    supported_slots: ClassVar[tuple[str, ...]] = ALL_FUSED

    num_hidden_layers: int = 1
    block: int = 3
    lstm_layers: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_number("block", self.block, 1, MAX_BLOCK, whole=True)
        check_number("lstm_layers", self.lstm_layers, 1, MAX_LAYERS, whole=True)
        if self.num_hidden_layers != 1:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers}, but keys of a second layer would "
                "depend on where blocks begin; give 1, and more lstm_layers"
            )


class FalconHead(StateHead):
    """Maps next tokens and the states before them to the states of K tokens later."""

    config: FalconHeadConfig
    config_class = FalconHeadConfig

    def __init__(self, config: FalconHeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width)
        self.lstm = nn.LSTM(width, width, config.lstm_layers, batch_first=True)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, nn.LSTM):
            module.reset_parameters()

    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        return self.layers, self.recur(self.fuse_inputs(embeds, states))[0]

    def fuse_inputs(self, embeds: Tensor, states: Tensor) -> Tensor:  # (n, q, D) x2 -> (n, q, D)
        """Inputs of the LSTM."""
        inputs: Tensor = self.fc(torch.cat((embeds, states), -1))
        return inputs

    def recur(
        self, inputs: Tensor, carry: Carry | None = None, pads: Sequence[int] = ()
    ) -> tuple[Tensor, Carry]:
        """Run the LSTM over slots (n, q, D), and add its outputs to them; its states after them.

        `pads` is the number of slots at the left of every row that are left out; one remains.
        """
        if not any(pads):
            out, carry = self.lstm(inputs, carry)
            return inputs + out, carry
        count = inputs.shape[1]
        lengths = [max(count - pad, 1) for pad in pads]
        start = torch.tensor([count - length for length in lengths], device=inputs.device)[:, None]
        slots = torch.arange(count, device=inputs.device)
        moved = _permute(inputs, (slots + start) % count)
        packed = pack_padded_sequence(
            moved, torch.tensor(lengths), batch_first=True, enforce_sorted=False
        )
        out, carry = self.lstm(packed, carry)
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=count)
        return inputs + _permute(padded, (slots - start) % count), carry

    def attend(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """States (n, q, D) of K tokens later, from what `recur` returned for q slots."""
        return self.run_layers(self.layers, inputs, attention_mask, position_ids, past_key_values)


def _permute(rows: Tensor, index: Tensor) -> Tensor:  # (n, q, D), (n, q) -> (n, q, D)
    return rows.gather(1, index[..., None].expand_as(rows))
