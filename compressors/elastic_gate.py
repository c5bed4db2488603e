"""Select the compression method of an image by the question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from mmspec.compressors.attn_topk import AttentionTopK
from mmspec.compressors.average_pool import AveragePool
from mmspec.compressors.cells import check_stride
from mmspec.compressors.contract import Compressed, Features
from mmspec.compressors.conv import SeparableConv
from mmspec.compressors.hide_all import HideAll
from mmspec.compressors.learned import Learned, check_heads, check_queries
from mmspec.compressors.resampler import QueryReader
from mmspec.compressors.selection import check_keep

BRANCHES = ("prune", "pool", "conv", "resampler", "drop")


@dataclass(frozen=True)
class ElasticGate(Learned):
    """A gate over pruning, pooling, convolution, resampler and no image (SpecVLM, Huang 2025).

    The gate is W2 SiLU(W1 u), u the mean embedding of the question; the best branch is used.
    Reconstructed: the form of the gate, and all ratios. `branch` selects a fixed branch instead of
    the gate: "prune" with keep=1, or "pool" with stride=1, is the identity. Initial weights: those
    of the branches, and torch defaults for linear maps. Recipe `specvlm` trains one inside a head.
    """

    keep: float = 0.5
    stride: int = 2
    queries: int = 32
    heads: int = 8
    branch: str = "auto"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "text"})
    position_rule: ClassVar[str] = "that of the chosen branch"

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_stride(self.stride)
        check_queries(self.queries, self.heads)
        if self.branch not in ("auto", *BRANCHES):
            raise ValueError(
                f"branch={self.branch!r} is not known; give auto or one of {', '.join(BRANCHES)}"
            )

    def network(self, width: int) -> nn.Module:
        check_heads(width, self.heads)
        return KeepGate(width, self)


class KeepGate(nn.Module):
    """The gate, and the branches with trained weights."""

    def __init__(self, width: int, design: ElasticGate) -> None:
        super().__init__()
        self.design = design
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, len(BRANCHES))
        self.conv = SeparableConv(width, design.stride)
        self.resampler = QueryReader(width, design.queries, design.heads)

    def forward(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        branch = self.design.branch
        if branch == "auto":
            branch = BRANCHES[int(self.logits(signals["text"]).argmax())]
        return self.apply_branch(branch, features, signals)

    def apply_branch(
        self, branch: str, features: Features, signals: Mapping[str, Tensor]
    ) -> Compressed:
        """Compress the image with one branch, regardless of the gate."""
        design = self.design
        made: Mapping[str, Any] = {
            "prune": AttentionTopK(design.keep).compress,
            "pool": AveragePool(design.stride).compress,
            "conv": self.conv,
            "resampler": self.resampler,
            "drop": HideAll().compress,
        }
        thin: Compressed = made[branch](features, signals)
        return thin

    def logits(self, text: Tensor) -> Tensor:  # (T, H) -> (5,)
        """The score of each branch for the question."""
        mean = text.to(self.up.weight.dtype).mean(0)
        scores: Tensor = self.down(nn.functional.silu(self.up(mean)))
        return scores
