"""Hydra heads: sequentially dependent heads, conditioned on the tokens drafted before.

Ankner et al. 2024. Head i predicts token t + 2 + i from the target's last hidden state h of token t
and the embeddings of all tokens in between:

    [h ; e(t + 1) ; .. ; e(t + 1 + i)] -> residual blocks -> output matrix of head i

Hydra++ computes h by a decoder layer over the states of all tokens so far (`prefix-mlp`). The
embedding table is the target's. Parameter names are those of the published checkpoints. Blocks have
separate weights; in published heads those after the first are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from mmspec.models.heads.medusa import MedusaBlock, init_block
from mmspec.models.heads.state_head import StateHeadConfig
from mmspec.models.llama_layers import LlamaHead
from mmspec.targets.fixed import BlockPlan, FixedCache

ARCHITECTURES = ("mlp", "prefix-mlp")


class HydraHeadsConfig(StateHeadConfig):
    """`hidden_size` and `vocab_size` are the target's; other names are the published ones."""

    model_type = "hydra"
    supported_choices: ClassVar[frozenset[str]] = frozenset()

    num_hidden_layers: int = 1
    hydra_num_heads: int = 4
    hydra_num_layers: int = 1
    hydra_head_arch: str = "mlp"
    dropout_rate: float = 0.0

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if self.hydra_head_arch not in ARCHITECTURES:
            raise ValueError(
                f"hydra_head_arch={self.hydra_head_arch!r} is not known; choose one of "
                f"{', '.join(ARCHITECTURES)}"
            )


class PrefixLayer(nn.Module):
    """A decoder layer and a norm over the target's states."""

    def __init__(self, config: HydraHeadsConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class HydraHeads(LlamaHead):
    """Maps a hidden state of the target and the tokens after it to logits of the next token."""

    config: HydraHeadsConfig
    config_class = HydraHeadsConfig
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"prefix_embeding_layer\.embed_tokens\.weight"
    ]

    def __init__(self, config: HydraHeadsConfig) -> None:
        super().__init__(config)
        width, rate = config.hidden_size, config.dropout_rate
        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
        for head in range(config.hydra_num_heads):
            blocks: list[nn.Module] = [nn.Dropout(rate), MedusaBlock(width, head + 2)]
            for _ in range(config.hydra_num_layers - 1):
                blocks += [nn.Dropout(rate), MedusaBlock(width)]
            self.hydra_mlp.append(nn.Sequential(*blocks))
            output = nn.Linear(width, config.vocab_size)
            self.hydra_lm_head.append(nn.Sequential(nn.Dropout(rate), output))
        self.prefix_embeding_layer = None  # spelling of the published checkpoints
        if config.hydra_head_arch == "prefix-mlp":
            self.prefix_embeding_layer = PrefixLayer(config)
            self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not init_block(module):
            super()._init_weights(module)  # type: ignore[no-untyped-call]

    @property
    def reach(self) -> int:
        """How many heads there are."""
        return self.config.hydra_num_heads

    def prefix(
        self,
        states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Inputs of the heads for the target's states (R, q, D); unchanged without a prefix layer.

        `attention_mask` is (R, L), or (1 or R, 1, q, L) and additive.
        """
        if self.prefix_embeding_layer is None:
            return states
        layer = self.prefix_embeding_layer
        states = self.run_layers(
            layer.layers, states, attention_mask, position_ids, past_key_values
        )
        normed: Tensor = layer.norm(states)
        return normed

    def forward(self, prefix: Tensor, embeds: Tensor) -> Tensor:  # (..., D), (..., i + 1, D)
        """Logits (..., V) of head i, conditioned on i + 1 tokens."""
        head = embeds.shape[-2] - 1
        inputs = torch.cat((prefix, embeds.flatten(-2)), -1)
        logits: Tensor = self.hydra_lm_head[head](self.hydra_mlp[head](inputs))
        return logits

    @torch.no_grad()
    def copy_output(self, weight: Tensor) -> None:  # (V, D)
        """Initialise the output matrix of every head with the target's."""
        for head in self.hydra_lm_head:
            assert isinstance(head, nn.Sequential)
            output = head[1]
            assert isinstance(output, nn.Linear)
            output.weight.copy_(weight)
            output.bias.zero_()


def make_compiled_prefix(heads: HydraHeads) -> Callable[..., Any]:
    """A function of tensors alone that reads states by the prefix layer: (R, q, D)."""

    def read(
        tokens: Tensor,  # (R, q), not read
        more: Sequence[Tensor],  # states (R, q, D)
        depths: Tensor,
        corner: Tensor,
        columns: Tensor,
        base: Tensor,
        offsets: Tensor | None,
        parts: Sequence[Tensor],
    ) -> tuple[Tensor]:
        plan = BlockPlan(depths, corner, columns, base, offsets)
        cache = FixedCache(parts, plan.slots)
        return (heads.prefix(more[0], plan.mask, plan.positions, cache),)

    return read
