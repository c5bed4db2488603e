"""Networks of a pipeline under forecasting, and the statistics they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from mmspec.drafters.forecast.work import PassWork


@dataclass(frozen=True)
class NetworkCall:
    """How one call of a network made its output: an entry per group of rows that is judged alone.

    With one group for all rows there is one entry.
    """

    forecast: tuple[bool, ...]  # whether a forecast was made
    computed: tuple[bool, ...]  # whether the output was computed; with a forecast: it was rejected
    errors: tuple[float | None, ...]  # of the forecasts that were checked
    limit: float | None  # of those errors; None = not known
    start: float  # `perf_counter()`
    seconds: tuple[float, float]  # of the forecast, and of computing


@dataclass
class Statistics:
    """Numbers of steps, counted per sample and per call of the network within a step."""

    full: int = 0  # computed, rejected ones included
    forecast: int = 0  # by forecast
    rejected: int = 0
    errors: list[tuple[int, float]] = field(default_factory=list)  # (step, error) of all checks
    passes: int = 0  # of plain sampling, where the work of a pass was counted
    work: float = 0.0  # in full passes, of those
    forecast_work: float = 0.0  # of the most expensive pass by forecast, in full passes
    calls: list[NetworkCall] = field(default_factory=list)  # in their order
    measures: bool = False  # computed in full to measure the network, for later calls

    @property
    def skipped_work(self) -> float | None:
        """Share of the work of plain sampling that was not computed; None if not counted."""
        return 1 - self.work / self.passes if self.passes else None

    def add_call(self, call: NetworkCall) -> None:
        """Count one call of a network."""
        self.calls.append(call)
        self.full += sum(call.computed)
        self.forecast += len(call.computed) - sum(call.computed)
        self.rejected += sum(a and b for a, b in zip(call.forecast, call.computed, strict=True))

    def add_work(self, work: PassWork | None, full: float, forecast: bool, checked: bool) -> None:
        """Count one step: the share of rows computed in full, and a pass by forecast before."""
        if work is None:
            return
        self.passes += 1
        self.work += full + forecast * (work.forecast + checked * work.check)
        if forecast:
            self.forecast_work = max(self.forecast_work, work.forecast)


@dataclass
class AttachedNetworks:
    """All overridden networks of a pipeline; call it to restore them."""

    each: list[Callable[[], None]]
    statistics: Statistics

    @classmethod
    def to(
        cls,
        networks: Sequence[nn.Module],
        one: Callable[[nn.Module], Callable[[], None]],
        statistics: Statistics,
    ) -> AttachedNetworks:
        """Override every network, or none where one of them is rejected."""
        taken = cls([], statistics)
        try:
            for network in networks:
                taken.each.append(one(network))
        except BaseException:
            taken()
            raise
        return taken

    def __call__(self) -> None:
        for detach in reversed(self.each):
            detach()
