"""Gates for forecast features: SpeCa with an error check, TaylorSeer without."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.targets.continuous.forecast_error import Metric, relative_norm
from mmspec.targets.continuous.forecast_schedule import (
    Cadence,
    DecayingThreshold,
    ForecastSchedule,
    SampleHistory,
)


class NetworkGate(Verifier):
    """Acts inside a network, on features of a step; it verifies no tokens. Always lossy."""

    use: ClassVar[str]  # where it belongs
    lossless: ClassVar[bool] = False
    decodes: ClassVar[tuple[str, ...]] = ("latents",)
    kinds: ClassVar[tuple[Kind, ...]] = ()

    def count_fewest(self, steps: int) -> int:
        """The fewest of so many steps that are computed in full, if every check passes."""
        return min(steps, 1)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        raise ValueError(
            f"{type(self).__name__} verifies features inside a network, not drafted tokens; use it "
            f"with {self.use} on a diffusers pipeline"
        )


@dataclass(frozen=True)
class ForecastGate(NetworkGate):
    """Accept a forecast denoising step unless the error at its last block is too large.

    SpeCa (Liu et al. 2025). `schedule` determines which steps are forecast, which of those are
    checked, and the accepted error; without checks (`Cadence`) this is TaylorSeer. With `rollback`
    a rejected step is computed in full at once; without it, as in the published code, the step
    stays and the next one is computed in full. With `per_sample` every image is checked on its own,
    else the batch as a whole.

    Lossy: an accepted forecast is never the network's prediction. Exact only if nothing passes (a
    negative threshold, every step checked, `rollback`) or nothing is forecast (interval 1).
    """

    schedule: ForecastSchedule = field(default_factory=DecayingThreshold)
    metric: Metric = relative_norm
    rollback: bool = True
    per_sample: bool = True
    use: ClassVar[str] = "the recipes speca and taylorseer"

    def count_fewest(self, steps: int) -> int:
        past, full = SampleHistory(), 0
        for step in range(steps):
            is_full = self.schedule.needs_full_step(past, step / steps)
            past = past.after_full_step() if is_full else past.after_forecast(None)
            full += is_full
        return full


def fixed_cadence(interval: int, warm_up: int) -> ForecastGate:
    """One full step, then `interval` - 1 unchecked forecasts, for all samples together."""
    return ForecastGate(Cadence(interval, warm_up), per_sample=False)
