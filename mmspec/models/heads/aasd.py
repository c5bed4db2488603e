"""The head of AASD: one decoder layer that attends to the target's own keys and values.

Yang et al. 2025. Of tokens that the target has read, the head attends to the target's keys and
values in one layer, those of pictures projected to few along the token axis; of tokens drafted
since, to its own:

    embedding of token t -> layer over [target's, text] [target's, pictures, projected] [own, since]
                         -> norm -> the target's output head

Keys of the target are rotated already, so queries and own keys turn by the target's positions and
frequencies. Reconstructed from the abstract: the layer reads embeddings alone, has Llama's form,
and stands on the target's last layer that attends to everything.
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
from mmspec.models.reading import read
from mmspec.targets.readers.attention_tap import full_layers


class AasdHeadConfig(StateHeadConfig):
    """`kv_layer` of the target is attended to, counted from 0.

    A picture of n slots is projected to `image_slots`, if it has more. The weights are made for
    `image_size` slots, and stretched along the tokens of a picture of another size.
    """

    model_type = "aasd_head"
    chooses: ClassVar[frozenset[str]] = frozenset({"positions"})

    num_hidden_layers: int = 1
    kv_layer: int = 0
    image_slots: int = 64
    image_size: int = 576

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if not 1 <= self.image_slots <= self.image_size:
            raise ValueError(
                f"image_slots={self.image_slots} of image_size={self.image_size} is no projection; "
                "give 1 to image_size"
            )
        if self.num_hidden_layers != 1:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers}, but an AASD head has one; drop it"
            )

    @classmethod
    def of(cls, config: Any, vocabulary: int, **changes: Any) -> Any:
        """The configuration of a head for a decoder with this text configuration.

        It turns as the layer that it attends to.
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
    """Weights (G, m, N) for keys and for values of G heads; they begin as means over runs."""

    def __init__(self, heads: int, slots: int, size: int) -> None:
        super().__init__()
        self.slots = slots
        means = run_means(slots, size).expand(heads, -1, -1)
        self.keys, self.values = (nn.Parameter(means.clone()) for _ in range(2))

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (G, n, d) of a picture as (G, m, d) each; as they are where n <= m."""
        if keys.shape[1] <= self.slots:
            return keys, values
        return _along(self.keys, keys), _along(self.values, values)


def _along(weights: Tensor, given: Tensor) -> Tensor:  # (G, m, N), (G, n, d) -> (G, m, d)
    size, count = weights.shape[-1], given.shape[1]
    if size != count:
        stretched = functional.interpolate(weights.float(), size=count, mode="linear")
        weights = stretched * (size / count)
    return weights.to(given.dtype) @ given


def run_means(slots: int, size: int) -> Tensor:  # (m, n)
    """The projection that averages m runs of n tokens, which overlap where m does not divide n."""
    means: Tensor = functional.adaptive_avg_pool1d(torch.eye(size)[None], slots)[0].T
    return means.contiguous()


class AasdHead(LlamaHead):
    """Embeddings of tokens, and the target's keys and values, to what its output head reads."""

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
        """What the output head reads (B, q, D), of embeddings (B, q, D).

        `memory` is a cache in whose layer `kv_layer` the target's keys and values lie; own ones are
        written behind them. `attention_mask` is (1 or B, 1, q, L) and additive; `position_ids` (1
        or B, q), or (3, B, q) with M-RoPE.
        """
        behind = self.behind([self.layer], embeds, attention_mask, position_ids, memory)
        normed: Tensor = self.norm(behind)
        return normed


def load_aasd_head(folder: str | Path, dtype: torch.dtype | None = None) -> AasdHead:
    """Read a head from a folder, as it was saved or in `dtype`.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: AasdHead = read(AasdHead, folder, "AASD head", dtype)
    return loaded
