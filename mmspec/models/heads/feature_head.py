"""A feature head: one decoder layer that continues the hidden states of a target (EAGLE).

Li et al. 2024. It reads the next token beside the target's state behind the one before, and says
what the target's state behind that next token will be; the target's own output head turns that into
a distribution:

    slot t    fc([embedding of token t + 1 ; state of slot t]) -> layers -> state of slot t + 1

A *state* is what the target's output head sees: its last hidden state, behind the final norm. The
embedding table and the output head are the target's and are not kept here. Layers are Llama's, the
first without a norm in front of its attention, for every target; rotary positions count slots from
0 unless the configuration says otherwise. Parameter names are those of the public EAGLE-1 and
EAGLE-2 checkpoints, and of ViSpec and MSD, which differ in what becomes of pictures.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mmspec.models.heads.image_adaptor import ImageAdaptor
from mmspec.models.heads.state_head import (
    Glance,
    PictureSlots,
    SlotMarks,
    SlotRotaryEmbedding,
    StateHead,
    StateHeadConfig,
    step_table,
    stepped,
)
from mmspec.models.llama_layers import Layers
from mmspec.models.reading import read


class FeatureHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; `bias` is that of `fc`, `input_norm` a norm before the first attention.

    `visual_slots="compressed"` takes one of two: `num_q` queries of a resampler over a picture's
    embeddings, the last of which gives a global vector that every later state is joined with
    (ViSpec), or `num_latents` vectors that attend to its features (SpecFLASH).
    """

    model_type = "feature_head"

    num_hidden_layers: int = 1
    bias: bool = True
    input_norm: bool = False
    num_q: int = 0
    num_latents: int = 0

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if (self.visual_slots == "compressed") != ((self.num_q > 0) != (self.num_latents > 0)):
            raise ValueError(
                f"visual_slots={self.visual_slots!r} with num_q={self.num_q} and num_latents="
                f"{self.num_latents}; 'compressed' takes exactly one of them, others take none"
            )


class FeatureHead(StateHead):
    """Next tokens and the states before them to the states behind them."""

    config: FeatureHeadConfig
    config_class = FeatureHeadConfig
    _keys_to_ignore_on_load_unexpected = [r"embed_tokens\.weight"]  # noqa: RUF012

    def __init__(self, config: FeatureHeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        count = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, layer) for layer in count)
        if not config.input_norm:
            self.layers[0].input_layernorm = nn.Identity()
        self.rotary_emb = SlotRotaryEmbedding(config)
        self.step_residual = step_table(config)
        latents = config.num_latents
        self.latents = nn.Parameter(torch.zeros(latents, width)) if latents else None
        self.imadpt = ImageAdaptor(config, config.num_q) if config.num_q else None
        self.img_fc = nn.Linear(2 * width, width) if config.num_q else None
        self.post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if module is self.img_fc:  # begins as EAGLE: the global vector is not heard
            eye = torch.eye(module.out_features)
            module.weight.copy_(torch.cat((eye, torch.zeros_like(eye)), 1))
            module.bias.zero_()
        if isinstance(module, ImageAdaptor):
            module.q.normal_(0.0, module.head_dim**-0.5)
        if module is self and self.latents is not None:
            self.latents.normal_(0.0, self.config.initializer_range)

    def entered(self, embeds: Tensor, states: Tensor, marks: SlotMarks) -> tuple[Layers, Tensor]:
        return self.layers, self.merged(embeds, states, marks)

    def merged(self, embeds: Tensor, states: Tensor, marks: SlotMarks) -> Tensor:  # (B, q, D)
        """What the layers read."""
        if self.img_fc is not None:
            seen = marks.global_vector
            seen = torch.zeros_like(states) if seen is None else seen.expand_as(states)
            states = self.img_fc(torch.cat((states, seen), -1))
        merged: Tensor = self.fc(torch.cat((embeds, states), -1))
        merged = stepped(merged, self.step_residual, marks.steps)
        if marks.raw is not None:
            merged = torch.where(marks.raw[..., None], embeds, merged)
        return merged

    def compressed(self, picture: PictureSlots) -> Glance:
        features, count = picture.features, len(picture.embeds)
        places = torch.arange(count, device=features.device)
        if self.imadpt is not None:  # at the last slots of the picture
            seen = self.imadpt(picture.embeds)
            left = min(len(seen) - 1, count)
            return Glance(seen[:-1][:left], places[count - left :], seen[-1])
        if self.latents is not None:  # softmax(A F') F: no projection, no scaling
            seen = (self.latents[:count] @ features.T).softmax(-1) @ features
            return Glance(seen, places[: len(seen)])
        return super().compressed(picture)


def load_head(folder: str | Path, dtype: torch.dtype | None = None) -> FeatureHead:
    """Read a head from a folder, as it was saved or in `dtype`.

    Raises ValueError where the folder holds another kind of model.
    """
    loaded: FeatureHead = read(FeatureHead, folder, "feature head", dtype)
    return loaded
