"""The first block as a cheap check of all others (first-block cache, ParaAttention)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmspec.verifiers.forecast_gate import NetworkGate


@dataclass(frozen=True)
class FirstBlockGate(NetworkGate):
    """Skip all blocks but the first while its residual changes by at most `threshold`.

    The relative change is mean |r - r'| / mean |r'| over the batch, with r' from the last full
    step. Lossy; a negative threshold skips nothing.
    """

    threshold: float = 0.05
    use: ClassVar[str] = "the recipe first-block-cache"
