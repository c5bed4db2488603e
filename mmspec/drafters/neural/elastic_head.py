"""A feature head for which a gate chooses by the question how a picture is thinned (SpecVLM).

Huang et al. 2025. What the head's layer reads of a picture, embeddings and states already fused,
goes through one of five branches: pruning by the target's attention, average pooling, strided
convolution, resampler, or nothing at all. So "prune" with keep=1 is a head that reads all of it
(EagleVLM), and "drop" is one that reads text alone.

    slots of a picture    fc([e f])  fc([e f])  fc([e f])  fc([e f])   -> branch ->   x  .  x  .
"""

from __future__ import annotations

import copy
from math import gcd
from typing import Any

import torch
from torch import Tensor

from mmspec.compressors.contract import Compressed, Features
from mmspec.compressors.elastic_gate import BRANCHES, ElasticGate, KeepGate
from mmspec.drafters.neural.feature_head import FeatureDraft
from mmspec.drafters.neural.head_kind import HeadKind
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.models.heads.state_head import (
    Glance,
    PictureSlots,
    SlotMarks,
    StateHead,
    StateHeadConfig,
)
from mmspec.models.llama_layers import Layers

HEADS = 8  # of the resampler, where that divides the width


class ElasticHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; `keep`, `stride`, `queries`, `branch` are those of an `ElasticGate`.

    The first attention has a norm in front (EagleVLM). All numbers are reconstructed.
    """

    model_type = "elastic_head"

    num_hidden_layers: int = 1
    visual_slots: str = "compressed"
    bias: bool = True
    keep: float = 0.5
    stride: int = 2
    queries: int = 32
    branch: str = "auto"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.visual_slots != "compressed":
            raise ValueError(
                f"visual_slots={self.visual_slots!r}, but a gate thins what this head reads of "
                "pictures; drop it, or train recipe eagle-2 with it"
            )
        self.gate()  # refuses what is no design

    def gate(self) -> ElasticGate:
        """The design of the gate."""
        heads = gcd(HEADS, self.hidden_size)
        return ElasticGate(self.keep, self.stride, self.queries, heads, self.branch)


class ElasticHead(StateHead):
    """A feature head, and a gate over what it reads of pictures."""

    config: ElasticHeadConfig
    config_class = ElasticHeadConfig

    def __init__(self, config: ElasticHeadConfig) -> None:
        super().__init__(config)
        own = {**config.to_dict(), "visual_slots": "raw", "input_norm": True}
        for name in ("model_type", "keep", "stride", "queries", "branch"):
            own.pop(name, None)
        self.head = FeatureHead(FeatureHeadConfig(**own))
        self.gate = KeepGate(config.hidden_size, config.gate())
        self.branch = config.branch
        self.post_init()  # type: ignore[no-untyped-call]

    @property
    def attention(self) -> frozenset[str]:
        return frozenset({"attention"})

    def forced(self, branch: str) -> ElasticHead:
        """The same parameters, with one branch whatever the gate says."""
        found = copy.copy(self)
        found.branch = branch
        return found

    def entered(self, embeds: Tensor, states: Tensor, marks: SlotMarks) -> tuple[Layers, Tensor]:
        return self.head.entered(embeds, states, marks)

    def behind(self, *read: Any, **named: Any) -> Tensor:
        """As its feature head."""
        return self.head.behind(*read, **named)

    def compressed(self, picture: PictureSlots) -> Glance:
        fused = self.head.merged(picture.embeds, self.fused(picture.before), SlotMarks())
        places = torch.arange(len(fused), device=fused.device)
        signals = {**picture.attention, "text": picture.question}
        features = Features(fused, places, picture.grid)
        branch = self.branch
        if branch == "auto":
            branch = BRANCHES[int(self.gate.logits(picture.question).argmax())]
        thin: Compressed = self.gate.by(branch, features, signals)
        return Glance(thin.features, thin.positions)


ELASTIC_HEAD = HeadKind(ElasticHead, FeatureDraft, "elastic feature head")
