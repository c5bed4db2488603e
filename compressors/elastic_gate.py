"""Choose by the question how a picture is thinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from mmspec.compressors.attending import check_heads, check_queries
from mmspec.compressors.attn_topk import AttentionTopK
from mmspec.compressors.average_pool import AveragePool
from mmspec.compressors.cells import check_stride
from mmspec.compressors.contract import Compressed, Features
from mmspec.compressors.conv import SeparableConv
from mmspec.compressors.hide_all import HideAll
from mmspec.compressors.learned import Learned
from mmspec.compressors.resampler import QueryReader
from mmspec.compressors.selection import check_keep

BRANCHES = ("prune", "pool", "conv", "resampler", "drop")


@dataclass(frozen=True)
class ElasticGate(Learned):
    """A gate over pruning, pooling, convolution, resampler and no picture (SpecVLM, Huang 2025).

    The gate is W2 SiLU(W1 u), u the mean embedding of the question; the best branch is taken.
    Reconstructed: the gate's form, and all ratios. `branch` takes one whatever the gate says:
    "prune" with keep=1, or "pool" with stride=1, is the identity. Initial weights: those of the
    branches, and linear maps as torch makes them. Recipe `specvlm` trains one inside a head.
    """

    keep: float = 0.5
    stride: int = 2
    queries: int = 32
    heads: int = 8
    branch: str = "auto"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "text"})
    places: ClassVar[str] = "that of the chosen branch"

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
    """The gate, and the branches that have weights of their own."""

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
        return self.by(branch, features, signals)

    def by(self, branch: str, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        """What one branch makes of a picture, whatever the gate says."""
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
        """How well each branch suits the question."""
        mean = text.to(self.up.weight.dtype).mean(0)
        scores: Tensor = self.down(nn.functional.silu(self.up(mean)))
        return scores
