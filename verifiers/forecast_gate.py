"""Gates forecasts of features by the error of a cheap check: SpeCa, and TaylorSeer without any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.targets.continuous.forecast_error import Metric, relative_norm
from mmspec.targets.continuous.forecast_schedule import Cadence, DecayingThreshold, ForecastSchedule


class NetworkGate(Verifier):
    """Works inside a network, on features of a step; no token is drafted there. Always lossy."""

    use: ClassVar[str]  # where it belongs
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = ()

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        raise ValueError(
            f"{type(self).__name__} verifies features inside a network, not drafted tokens; use it "
            f"with {self.use} on a diffusers pipeline"
        )


@dataclass(frozen=True)
class ForecastGate(NetworkGate):
    """Keep a forecast denoising step unless the check of its last block is off by too much.

    SpeCa (Liu et al. 2025). `schedule` says which steps are forecast, which of those are checked
    and how large an error passes; without checks (`Cadence`) this is TaylorSeer. With `rollback` a
    rejected step is computed in full at once; without, as in the published code, it stays and the
    next one is. With `per_sample` every picture is judged on its own, else the batch is as one.

    Lossy: what passes is never the network's own prediction. Exact only where nothing passes
    (a negative threshold, every step checked, `rollback`), or nothing is forecast (interval 1).
    """

    schedule: ForecastSchedule = field(default_factory=DecayingThreshold)
    metric: Metric = relative_norm
    rollback: bool = True
    per_sample: bool = True
    use: ClassVar[str] = "the recipes speca and taylorseer"


def fixed_cadence(interval: int, warm_up: int) -> ForecastGate:
    """One step in full, then `interval` - 1 forecasts unchecked; all samples go together."""
    return ForecastGate(Cadence(interval, warm_up), per_sample=False)
