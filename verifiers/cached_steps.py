"""When caches of diffusers reuse what they have computed in an earlier step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmspec.errors import check_number
from mmspec.verifiers.forecast_gate import NetworkGate


@dataclass(frozen=True)
class MagnitudeGate(NetworkGate):
    """Skip all blocks while the expected change of their residual's norm stays within `error`.

    MagCache (Ma et al. 2025): the error is the sum of |1 - product of ratios| over the steps since
    the last full one, with ratios that were measured before. At most `most` steps in a row are
    skipped, and none in the first `retention` of all steps. Lossy; a negative error skips nothing.
    """

    error: float = 0.06
    most: int = 3
    retention: float = 0.2
    use: ClassVar[str] = "the recipe mag-cache"

    def __post_init__(self) -> None:
        check_number("most", self.most, 0, whole=True, example=3)
        check_number("retention", self.retention, 0, 1, example=0.2)

    def count_fewest(self, steps: int) -> int:
        kept = min(max(int(self.retention * steps + 0.5), 1), steps)
        return kept + (steps - kept) // (self.most + 1)


@dataclass(frozen=True)
class AccumulatedChangeGate(NetworkGate):
    """Skip all blocks while the accumulated change of an indicator is less than `change`.

    TeaCache (Liu et al. 2025) and SeaCache: mean |a - b| / mean |b| between neighbouring steps, in
    TeaCache rescaled by a polynomial, summed since the last full step. The indicator is the first
    block's modulated input, or the filtered states. At most `most` steps in a row are skipped (0:
    any number), none of the first `warm_up`, and not the last one. Lossy; a change of 0 skips
    nothing.
    """

    change: float = 0.25
    most: int = 2
    warm_up: int = 1
    use: ClassVar[str] = "the recipes sea-cache and tea-cache"

    def __post_init__(self) -> None:
        check_number("threshold", self.change, 0, example=0.25)
        check_number("most", self.most, 0, whole=True, example=2)
        check_number("warm_up", self.warm_up, 0, whole=True, example=1)

    def count_fewest(self, steps: int) -> int:
        first = min(max(self.warm_up, 1), steps)
        rest = max(steps - first - 1, 0)  # without the last step, which is full
        return min(first + (rest // (self.most + 1) if self.most else 0) + 1, steps)


@dataclass(frozen=True)
class BroadcastGate(NetworkGate):
    """Compute attention in one step of so many, between two timesteps of 1000 (noise) to 0.

    Pyramid attention broadcast (Zhao et al. 2024). Lossy, without a measure of its error; ranges of
    1 skip nothing.
    """

    spatial: int = 2
    temporal: int = 4
    cross: int = 6
    begin: float = 800.0
    end: float = 100.0
    use: ClassVar[str] = "the recipe pab"

    def __post_init__(self) -> None:
        for name in ("spatial", "temporal", "cross"):
            check_number(name, getattr(self, name), 1, whole=True, example=2)
        if not self.end < self.begin:
            raise ValueError(
                f"begin={self.begin} must be above end={self.end}, as timesteps fall from 1000 to "
                "0; give begin=800, end=100"
            )

    def count_fewest(self, steps: int) -> int:
        skips = max(self.spatial, self.temporal, self.cross) > 1
        return min(steps, 1) if skips else steps


@dataclass(frozen=True)
class IntervalGate(NetworkGate):
    """Compute the deep levels of a U-Net in one step of `interval`.

    DeepCache (Ma et al. 2024). Lossy, without a measure of its error; 1 skips nothing.
    """

    interval: int = 3
    use: ClassVar[str] = "the recipe deep-cache"

    def __post_init__(self) -> None:
        check_number("interval", self.interval, 1, whole=True, example=3)

    def count_fewest(self, steps: int) -> int:
        return -(-steps // self.interval)
