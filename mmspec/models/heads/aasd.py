"""The AASD head: one decoder layer that attends to the target's keys and values.

Yang et al. 2025. For tokens that the target has read, the head attends to the target's keys and
values of one layer, with those of images projected to fewer along the token axis; for drafted
tokens, to its own:

    embedding of token t -> layer over [target's, text] [target's, images, projected] [own, drafted]
                         -> norm -> the target's output head

The target's keys are rotated already, so queries and own keys use the target's positions and
frequencies. Reconstructed from the abstract: a Llama layer reads embeddings alone, and attends to
the target's last layer with full attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from mmspec.models.heads.state_head import SlotRotaryEmbedding, StateHeadConfig
from mmspec.models.llama_layers import LlamaHead
from mmspec.models.loading import load_model
from mmspec.targets.readers.attention_tap import full_layers


class AasdHeadConfig(StateHeadConfig):
    """`kv_layer` is the target layer that is attended to, counted from 0.

    An image with more than `image_slots` slots is projected to as many. The weights are made for
    `image_size` slots, and interpolated along the tokens for images of other sizes.
    """

    model_type = "aasd_head"
    supported_choices: ClassVar[frozenset[str]] = frozenset({"positions"})

    num_hidden_layers: int = 1
    kv_layer: int = 0
    image_slots: int = 64
    image_size: int = 576

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if not 1 <= self.image_slots <= self.image_size:
            raise ValueError(
                f"image_slots={self.image_slots} of image_size={self.image_size} must be from 1 "
                "to image_size"
            )
        if self.num_hidden_layers != 1:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers}, but an AASD head has one; drop it"
            )

    @classmethod
    def of(cls, config: Any, vocabulary: int, **changes: Any) -> Any:
        """Make the configuration of a head for a decoder with this text configuration.

        Rotary settings are those of the layer that it attends to.
        """
        layer = changes.get("kv_layer", full_layers(config)[-1])
        rope = dict(getattr(config, "rope_parameters", None) or {})
        kinds = getattr(config, "layer_types", None)
        if kinds and isinstance(rope.get(kinds[layer]), dict):
            rope = dict(rope[kinds[layer]])
        rope = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
        positions = "mrope" if rope.get("mrope_section") else "keep"
        own = {"kv_layer": layer, "rope_parameters": rope, "positions": positions}
        return super().of(config, vocabulary, **{**own, **changes})


class KvProjector(nn.Module):
    """Projects keys and values of G heads, by weights (G, m, N) initialised as means over runs."""

    def __init__(self, heads: int, slots: int, size: int) -> None:
        super().__init__()
        self.slots = slots
        means = run_means(slots, size).expand(heads, -1, -1)
        self.keys, self.values = (nn.Parameter(means.clone()) for _ in range(2))

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Project keys and values (G, n, d) of an image to (G, m, d); unchanged if n <= m."""
        if keys.shape[1] <= self.slots:
            return keys, values
        return _project(self.keys, keys), _project(self.values, values)


def _project(weights: Tensor, given: Tensor) -> Tensor:  # (G, m, N), (G, n, d) -> (G, m, d)
    size, count = weights.shape[-1], given.shape[1]
    if size != count:
        stretched = functional.interpolate(weights.float(), size=count, mode="linear")
        weights = stretched * (size / count)
    return weights.to(given.dtype) @ given


def run_means(slots: int, size: int) -> Tensor:  # (m, n)
    """Projection that averages m runs of n tokens, which overlap unless m divides n."""
    means: Tensor = functional.adaptive_avg_pool1d(torch.eye(size)[None], slots)[0].T
    return means.contiguous()


class AasdHead(LlamaHead):
    """Maps embeddings and the target's keys and values to inputs of its output head."""

    config: AasdHeadConfig
    config_class = AasdHeadConfig

    def __init__(self, config: AasdHeadConfig) -> None:
        super().__init__(config)
        shared = config.num_key_value_heads or config.num_attention_heads
        self.layer = LlamaDecoderLayer(config, config.kv_layer)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.projector = KvProjector(shared, config.image_slots, config.image_size)
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, KvProjector):
            means = run_means(*module.keys.shape[1:]).to(module.keys)
            module.keys.copy_(means.expand_as(module.keys))
            module.values.copy_(means.expand_as(module.values))

    def forward(
        self, embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor, memory: Any
    ) -> Tensor:
        """Map embeddings (B, q, D) to inputs of the output head (B, q, D).

        `memory` is a cache whose layer `kv_layer` holds the target's keys and values; own ones are
        appended. `attention_mask` is (1 or B, 1, q, L) and additive; `position_ids` (1
        or B, q), or (3, B, q) with M-RoPE.
        """
        states = self.run_layers([self.layer], embeds, attention_mask, position_ids, memory)
        normed: Tensor = self.norm(states)
        return normed


def load_aasd_head(folder: str | Path, dtype: torch.dtype | None = None) -> AasdHead:
    """Load a head from a folder, in the saved dtype or `dtype`.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: AasdHead = load_model(AasdHead, folder, "AASD head", dtype)
    return loaded
