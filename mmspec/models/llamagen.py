"""LlamaGen: a Llama that generates images (Sun et al. 2024), in the style of transformers.

The blocks are Llama's. A class or a caption precedes the image tokens, in *condition slots*. Rotary
positions are two-dimensional; condition slots have all-zero cosines and sines, so their queries and
keys are zero:

    position   0 .. T-1         T + row * side + column
    rotary     cos = sin = 0    first half of a head rotated by the row, second half by the column

transformers' Llama pairs channel i with i + d/2, the public checkpoints i with i + 1;
`mmspec.models.llamagen_weights` reorders the projections.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from mmspec import _hf_cache
from mmspec.models.llama_layers import LlamaLayers, run_decoder_layers
from mmspec.models.llamagen_vq import LlamaGenVQ, LlamaGenVQConfig

CONDITIONS = ("class", "caption")


class LlamaGenConfig(LlamaConfig):
    """`condition` is "class" (one slot) or "caption" (`condition_length` slots of features).

    With `vq_config` the model includes its image decoder.
    """

    model_type = "llamagen"

    vocab_size: int = 16384
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    condition: str = "class"
    condition_length: int = 1
    num_classes: int = 1000
    caption_size: int = 2048
    side: int = 16  # the image has side x side codes
    vq_config: dict[str, Any] | None = None


class LlamaGenPreTrainedModel(LlamaLayers):
    """Flags that transformers reads."""

    config: LlamaGenConfig
    config_class = LlamaGenConfig


class LlamaGenModel(LlamaGenPreTrainedModel):
    """Maps condition and codes to hidden states."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        if config.condition not in CONDITIONS:
            known = ", ".join(CONDITIONS)
            raise ValueError(f"condition={config.condition!r} is not known; choose one of {known}")
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.condition: ClassTable | CaptionProjector = (
            ClassTable(config.num_classes, width)
            if config.condition == "class"
            else CaptionProjector(config.caption_size, width, config.condition_length)
        )
        count = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, layer) for layer in count)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Read codes (B, q), or embeddings (B, q, D), at explicit or consecutive positions."""
        cache = past_key_values if cache is None else cache  # its name up to transformers 5.23
        if inputs_embeds is None:
            assert input_ids is not None, "give input_ids or inputs_embeds"
            inputs_embeds = self.embed_tokens(input_ids)
        dtype = inputs_embeds.dtype
        states = run_decoder_layers(
            list(self.layers)[: self.config.num_hidden_layers],
            inputs_embeds,
            lambda positions: rotary(self.config, positions, dtype),
            config=self.config,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=use_cache,
        )
        return BaseModelOutputWithPast(self.norm(states), cache)


class LlamaGenForImageGeneration(LlamaGenPreTrainedModel):
    """The model with an output head over codes, and the image decoder if configured."""

    output_modalities = ("image",)

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        self.model = LlamaGenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.vqmodel: LlamaGenVQ | None = None
        if config.vq_config is not None:
            self.vqmodel = LlamaGenVQ(LlamaGenVQConfig(**config.vq_config))
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, logits_to_keep: int = 0, **inputs: Any) -> CausalLMOutputWithPast:
        """Logits (B, q, V); the inputs are those of `LlamaGenModel`."""
        out = self.model(**inputs)
        states = out.last_hidden_state[:, -logits_to_keep:]
        return CausalLMOutputWithPast(None, self.lm_head(states), _hf_cache.output_cache(out))


class ClassTable(nn.Module):
    """Class embeddings, one slot each; the last row means no class."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes + 1, width)

    def forward(self, classes: Tensor) -> Tensor:  # (B, 1) -> (B, 1, D)
        embeds: Tensor = self.embedding(classes)
        return embeds


class CaptionProjector(nn.Module):
    """Projects features of a text encoder (T5), one slot each; `unconditional` means no caption."""

    def __init__(self, size: int, width: int, slots: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, width, bias=False)
        self.fc2 = nn.Linear(width, width, bias=False)
        self.unconditional = nn.Parameter(torch.randn(slots, size) / size**0.5)

    def forward(self, features: Tensor) -> Tensor:  # (B, T, C) -> (B, T, D)
        inner = nn.functional.gelu(self.fc1(features), approximate="tanh")
        embeds: Tensor = self.fc2(inner)
        return embeds


def rotary(
    config: LlamaGenConfig, position_ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, q, d) of positions (B, q); zero for condition slots."""
    width = config.hidden_size // config.num_attention_heads
    quarter = torch.arange(0, width // 2, 2, device=position_ids.device, dtype=torch.float32)
    rope: Any = config.rope_parameters
    speed = 1.0 / rope["rope_theta"] ** (quarter / (width // 2))  # (d / 4,)
    cell = position_ids - config.condition_length
    row = (cell.clamp_min(0) // config.side)[..., None] * speed
    column = (cell.clamp_min(0) % config.side)[..., None] * speed
    angle = torch.cat((row, column, row, column), -1)
    inside = (cell >= 0)[..., None]
    return (angle.cos() * inside).to(dtype), (angle.sin() * inside).to(dtype)
