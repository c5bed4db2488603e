"""The DFlash drafter: a block of masked tokens, denoised in one step over states of the target.

Chen et al. 2026, "DFlash: block diffusion for flash speculative decoding". The features of a token
are hidden states of several target layers, which `fc` fuses. Every layer projects them to keys and
values of its context, once per token; only the tokens of a block pass through the layers:

    context      a     b     c          keys and values of hidden_norm(fc(features of the token))
    block                         d  ?  ?  ?     d is the newest token, ? the mask token
    predicts                      .  e  f  g

Tokens of a block attend to the context and to the whole block. Layers are those of Qwen3, and
parameter names those of the public checkpoints. Embeddings are the target's, and so is the output
head, unless the draft vocabulary is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, rotate_half

from mmspec.models.heads.draft_vocabulary import DraftVocabulary
from mmspec.models.heads.p_eagle import check_mask_token
from mmspec.models.heads.state_head import SlotRotaryEmbedding, StateHeadConfig
from mmspec.models.llama_layers import FULL, AttentionMask, LlamaHead
from mmspec.targets.fixed import BlockPlan, FixedCache

SLOTS, AXES = ("fused", "hidden"), ("keep", "mrope")


class DFlashHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; `tapped_layers=None` are the published ones of the target.

    `block_size` tokens are read at once, the newest one and masks: `block_size` - 1 are drafted.
    `num_taps` hidden states are fused. `visual_slots` is "fused", images are a part of the context,
    or "hidden", they are left out; `positions` is "keep" or "mrope". `num_target_layers` is that of
    public checkpoints, and not used.
    """

    model_type = "dflash_head"
    supported_choices: ClassVar[frozenset[str]] = frozenset(
        ("tapped_layers", "visual_slots", "positions")
    )

    num_hidden_layers: int = 5
    block_size: int = 16
    mask_token_id: int = 0
    num_taps: int = 5
    draft_vocab_size: int | None = None
    num_target_layers: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.layer_types = [FULL] * self.num_hidden_layers  # Qwen3's attention reads the list
        check_mask_token(self.mask_token_id, self.vocab_size)
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2")
        if self.num_taps < 1:
            raise ValueError(f"num_taps={self.num_taps} must be at least 1")
        if self.tapped_layers is not None and len(self.tapped_layers) != self.num_taps:
            raise ValueError(
                f"tapped_layers={list(self.tapped_layers)} does not have num_taps={self.num_taps} "
                "entries; make both agree"
            )
        for name, known in (("visual_slots", SLOTS), ("positions", AXES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not for a context of the target's states; "
                    f"give {' or '.join(map(repr, known))}"
                )


class DFlashHead(DraftVocabulary, LlamaHead):
    """Maps the newest token and masks after it to states of the masked tokens."""

    config: DFlashHeadConfig
    config_class = DFlashHeadConfig

    def __init__(self, config: DFlashHeadConfig) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.num_taps * width, width, bias=False)
        self.hidden_norm = LlamaRMSNorm(width, eps=eps)
        layer: Any = Qwen3DecoderLayer
        self.layers = nn.ModuleList(layer(config, at) for at in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(width, eps=eps)
        self.lm_head = (
            nn.Linear(width, self.draft_vocab_size, bias=False)
            if self.has_draft_vocabulary
            else None
        )
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.register_vocabulary()
        self.post_init()  # type: ignore[no-untyped-call]

    def taps(self, layers: int) -> tuple[int, ...]:
        own = self.config.tapped_layers
        return uniform_layers(layers, self.config.num_taps) if own is None else tuple(own)

    @property
    def reach(self) -> int:
        """Number of tokens that are drafted at once."""
        return self.config.block_size - 1

    def fuse(self, features: Tensor) -> Tensor:  # (..., k * D) -> (..., D)
        """Fuse the target's features into states of the context."""
        fused: Tensor = self.hidden_norm(self.fc(features))
        return fused

    def cache_context(self, states: Tensor, position_ids: Tensor, cache: Cache) -> None:
        """Cache the keys and values of context states (B, n, D) in every layer.

        `position_ids` are (1 or B, n), or (3, B, n) with M-RoPE.
        """
        cos, sin = (part[:, None] for part in self.rotary_emb(states, position_ids))
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            shape = (-1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(states).unflatten(-1, shape)).transpose(1, 2)
            values = attention.v_proj(states).unflatten(-1, shape).transpose(1, 2)
            cache.update(keys * cos + rotate_half(keys) * sin, values, index)

    def forward(
        self,
        embeds: Tensor,
        attention_mask: AttentionMask,
        position_ids: Tensor,
        past_key_values: Cache,
    ) -> Tensor:
        """States (B, q, D) of the tokens of blocks, from their `embeds`.

        `attention_mask` is (1 or B, 1, q, L) and additive, over context and blocks; `position_ids`
        are (1 or B, q), or (3, B, q) with M-RoPE.
        """
        out = self.run_layers(self.layers, embeds, attention_mask, position_ids, past_key_values)
        states: Tensor = self.norm(out)
        return states

    def logits(self, states: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of states (..., D) over the draft vocabulary: (..., V')."""
        return target_head(states) if self.lm_head is None else self.lm_head(states)


def make_compiled_step(
    head: DFlashHead, embed: Callable[[Tensor], Tensor], target_head: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    """A function of tensors alone that caches context slots and reads the block after them.

    Its results are logits (R, K, V') of the masks, the last tokens.
    """
    length = head.config.block_size

    def step(
        tokens: Tensor,  # (R, n + block_size)
        more: Sequence[Tensor],  # states (R, n + block_size, D), the first n of them of slots
        depths: Tensor,
        corner: Tensor,
        columns: Tensor,
        base: Tensor,
        offsets: Tensor | None,
        parts: Sequence[Tensor],
    ) -> tuple[Tensor]:
        plan, count = BlockPlan(depths, corner, columns, base, offsets), tokens.shape[1] - length
        states, places = more[0][:, :count], plan.positions
        head.cache_context(states, places[..., :count], FixedCache(parts, plan.slots[:, :count]))
        block = FixedCache(parts, plan.slots[:, count:])
        out = head(embed(tokens[:, count:]), plan.mask[:, :, count:], places[..., count:], block)
        return (head.logits(out[:, 1:], target_head),)

    return step


def uniform_layers(layers: int, count: int) -> tuple[int, ...]:
    """`count` hidden states of a target of L layers, evenly from 2 to L - 2; L // 2 + 1 if one.

    Hugging Face indices, clamped to 1 .. L. Published ids are those of layer outputs, one less.
    """
    if count == 1:
        outputs = [layers // 2]
    else:
        outputs = [round(1 + step * (layers - 4) / (count - 1)) for step in range(count)]
    return tuple(min(max(at + 1, 1), layers) for at in outputs)
