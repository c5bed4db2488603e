"""A feature head with a gate that selects the image compression from the question (SpecVLM).

Huang et al. 2025. The head's inputs for an image, embeddings and states already fused, go through
one of five branches: pruning by the target's attention, average pooling, strided convolution,
resampler, or no image at all. "prune" with keep=1 is a head that reads the whole image (EagleVLM),
"drop" is one that reads text only.

    slots of an image    fc([e f])  fc([e f])  fc([e f])  fc([e f])   -> branch ->   x  .  x  .
"""

from __future__ import annotations

import copy
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.compressors.contract import Compressed, Features
from mmspec.compressors.elastic_gate import BRANCHES, ElasticGate, KeepGate
from mmspec.drafters.neural.feature_head import FeatureDraft
from mmspec.drafters.neural.target_heads import HeadKind
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.models.heads.state_head import (
    CHOICES,
    CompressedImage,
    ImageSlots,
    SlotMarks,
    StateHead,
    StateHeadConfig,
)
from mmspec.models.llama_layers import Layers

HEADS = 8  # of the resampler, if that divides the width


class ElasticHeadConfig(StateHeadConfig):
    """As `StateHeadConfig`; `keep`, `stride`, `queries`, `branch` are those of an `ElasticGate`.

    The first attention has a norm before it (EagleVLM). All values are reconstructed.
    """

    model_type = "elastic_head"
    supported_choices: ClassVar[frozenset[str]] = CHOICES - {"sliding_window"}

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
                f"visual_slots={self.visual_slots!r}, but this head compresses images with a gate; "
                "drop it, or train recipe eagle-2 with it"
            )
        self.gate()  # raises ValueError for an invalid design

    def gate(self) -> ElasticGate:
        """The design of the gate."""
        heads = gcd(HEADS, self.hidden_size)
        return ElasticGate(self.keep, self.stride, self.queries, heads, self.branch)


class ElasticHead(StateHead):
    """A feature head, with a gate over its image inputs."""

    config: ElasticHeadConfig
    config_class = ElasticHeadConfig

    def __init__(self, config: ElasticHeadConfig) -> None:
        super().__init__(config)
        head_config = {**config.to_dict(), "visual_slots": "raw", "input_norm": True}
        for name in ("model_type", "keep", "stride", "queries", "branch"):
            head_config.pop(name, None)
        self.head = FeatureHead(FeatureHeadConfig(**head_config))
        self.gate = KeepGate(config.hidden_size, config.gate())
        self.branch = config.branch
        self.post_init()  # type: ignore[no-untyped-call]

    @property
    def attention(self) -> frozenset[str]:
        return frozenset({"attention"})

    def with_branch(self, branch: str) -> ElasticHead:
        """A copy with the same parameters that always uses one branch."""
        found = copy.copy(self)
        found.branch = branch
        return found

    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        return self.head.prepare_inputs(embeds, states, marks)

    def run_layers(self, *read: Any, **named: Any) -> Tensor:
        """As its feature head."""
        return self.head.run_layers(*read, **named)

    def compress_image(self, image: ImageSlots) -> CompressedImage:
        fused = self.head.fuse_inputs(image.embeds, self.fuse(image.before), SlotMarks())
        places = torch.arange(len(fused), device=fused.device)
        signals = {**image.attention, "text": image.question}
        features = Features(fused, places, image.grid)
        branch = self.branch
        if branch == "auto":
            branch = BRANCHES[int(self.gate.logits(image.question).argmax())]
        compressed: Compressed = self.gate.apply_branch(branch, features, signals)
        return CompressedImage(compressed.features, compressed.positions)


ELASTIC_HEAD = HeadKind(ElasticHead, FeatureDraft, "elastic feature head")
