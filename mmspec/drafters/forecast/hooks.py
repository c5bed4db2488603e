"""Attaches forecasting to the network of a pipeline, for one sampling call and any scheduler.

The network is called as usual; in a forecast step its layers return an extrapolation instead of
computing. SpeCa (Liu et al. 2025) checks such a step by also computing the last block, on the same
input. Lossy: the sampler receives other predictions than the network's own.

    step        0   1   2   3   4
    sample 0    F   t   t   R   t     F in full, t by forecast, R forecast, checked, rejected and
    sample 1    F   t   t   t   t     then computed in full, for that sample alone
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mmspec.drafters.forecast.attached import AttachedNetworks, NetworkCall, Statistics
from mmspec.drafters.forecast.compiled import (
    check_layers,
    compiler_of,
    copy_output,
    unwrap_compiled,
)
from mmspec.drafters.forecast.features import (
    Feature,
    Forecast,
    ForecastModules,
    ForwardOverride,
    find_modules,
    flatten_groups,
    is_overridden,
    replace_rows,
    select_rows,
    tensors,
)
from mmspec.drafters.forecast.forecast import HIGHEST_ORDER, Basis, Newton, Taylor, Timeline
from mmspec.drafters.forecast.steps import StepClock, check_finite, networks_of, time_of
from mmspec.drafters.forecast.work import PassWork, count_work
from mmspec.errors import check_number, choose_option
from mmspec.recipe import Kit
from mmspec.targets.continuous.forecast_error import Metric
from mmspec.targets.continuous.forecast_schedule import ForecastSchedule, SampleHistory


@runtime_checkable
class ForecastJudge(Protocol):
    """How the errors of forecasts are handled (`mmspec.verifiers.forecast_gate`)."""

    @property
    def schedule(self) -> ForecastSchedule: ...
    @property
    def metric(self) -> Metric: ...
    @property
    def rollback(self) -> bool: ...  # redo a rejected step at once, not the one after it
    @property
    def per_sample(self) -> bool: ...  # judge and redo each sample on its own


@dataclass(frozen=True)
class Extrapolation:
    """What a recipe forecasts, and with which basis.

    `lite` forecasts less: the output of the whole network, which works for any network; or, where
    forecasts are checked, the state before the last block and the layers of that block.
    """

    basis: Basis = field(default_factory=Taylor)
    order: int = 1
    lite: bool = False

    def __post_init__(self) -> None:
        check_number("order", self.order, 0, HIGHEST_ORDER, whole=True)

    def under(self, gate: object) -> Forecasting:
        """Bind to a recipe's verifier. Raises ValueError for one that judges something else."""
        if not isinstance(gate, ForecastJudge):
            raise ValueError(
                f"{type(gate).__name__} does not judge forecasts of features; give verifier= a "
                "ForecastGate"
            )
        return Forecasting(gate, self)


@dataclass(frozen=True)
class Forecasting:
    """Forecasts under a gate, ready to be attached to a network."""

    gate: ForecastJudge
    extrapolation: Extrapolation = field(default_factory=Extrapolation)

    def attach(self, pipe: Any, samples: int | None = None) -> AttachedNetworks:
        """Override the networks of a diffusers pipeline; calling the result restores them.

        One attachment serves one call of the pipeline. `samples` is the number of images of that
        call: it distinguishes the two branches of guidance from other images (None: every row is an
        image).
        """
        statistics, clock = Statistics(), StepClock()

        def one(network: nn.Module) -> Attachment:
            steps = lambda: len(pipe.scheduler.timesteps)  # noqa: E731, set by the call to come
            return self.attach_to(network, steps, samples, clock, statistics)

        return AttachedNetworks.to(networks_of(pipe), one, statistics)

    def attach_to(
        self,
        network: nn.Module,
        steps: Callable[[], int],
        samples: int | None = None,
        clock: StepClock | None = None,
        statistics: Statistics | None = None,
    ) -> Attachment:
        """Override a network that will be called for `steps()` steps.

        Alternating experts share a `clock` and their `statistics`.
        """
        if is_overridden(network):
            raise ValueError(
                f"{type(unwrap_compiled(network)).__name__} is already forecast; detach it first"
            )
        if getattr(network, "is_cache_enabled", False):
            raise ValueError(
                "the network has a cache of diffusers enabled; call disable_cache() first"
            )
        return Attachment(
            self, network, steps, samples, clock or StepClock(), statistics or Statistics()
        )


class Mode(Enum):
    """What the layers do in one pass through the network."""

    FULL = "compute and record"
    FORECAST = "return a forecast"
    EXACT = "compute only"


@dataclass
class CallSeries:
    """One series of calls, one per step: guidance by two calls per step makes two of them."""

    rows: int
    timeline: Timeline
    features: list[list[Feature]]  # per module, one for each of its calls in a pass
    pasts: list[SampleHistory]  # per group of rows
    work: PassWork | None = None  # None: not counted


class Attachment:
    """A network under forecasting; call it to detach. Holds the state of one sampling call."""

    def __init__(
        self,
        forecasting: Forecasting,
        network: nn.Module,
        steps: Callable[[], int],
        samples: int | None,
        clock: StepClock,
        statistics: Statistics,
    ) -> None:
        self.statistics, self._clock = statistics, clock
        self._gate, self._extrapolation = forecasting.gate, forecasting.extrapolation
        self._steps, self._samples = steps, samples
        self._has_checks = self._gate.schedule.has_checks
        self._forecasts_output = (
            self._extrapolation.lite and not self._has_checks
        )  # the output is the only feature
        self._inner, compile_with = unwrap_compiled(network), compiler_of(network)
        self._signature = inspect.signature(self._inner.forward)
        self._modules = ForecastModules((), None)
        if not self._forecasts_output:
            check_layers(self._inner)
            self._modules = find_modules(self._inner, self._extrapolation.lite)
        self._is_compiled = compile_with is not None or network._compiled_call_impl is not None
        self._series: list[CallSeries] = []
        self._step, self._ordinal = -1, 0  # of the last call
        self._current: CallSeries  # of the current call, and its mode:
        self._mode, self._checks = Mode.EXACT, False
        self._calls: Counter[int] = Counter()  # of each module, in this pass
        self._rows: Tensor | None = None
        self._scale = self._weights = self._errors = torch.empty(0)
        self._overrides = [ForwardOverride(network, self._network)]
        for index, (module, _) in enumerate(self._modules.modules):
            self._overrides.append(ForwardOverride(module, self._layer(index), compile_with))
        if self._modules.last is not None and self._has_checks:
            self._overrides.append(ForwardOverride(self._modules.last, self._last_block))

    def __call__(self) -> None:
        """Restore the network."""
        for taken in reversed(self._overrides):
            taken.restore()
        self._overrides, self._series = [], []

    def _network(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of the network: one step of one series."""
        start = perf_counter()
        call = self._signature.bind(*args, **kwargs)
        if self._is_compiled:  # as a whole, or its layers one by one
            original = copy_output(original) if self._forecasts_output else self._inner
        whole = partial(
            original, *args, **kwargs
        )  # with the original calling convention: compiled code depends on it
        series = self._current = self._find(call.arguments)
        schedule, progress = self._gate.schedule, self._step / max(self._steps(), 1)
        full = [schedule.needs_full_step(past, progress) for past in series.pasts]
        drafted, limit = [not one for one in full], None
        output: Any = None
        errors: list[float | None] = [None] * len(full)
        is_forecast, self._checks = not all(full), False
        if is_forecast:
            checked = [
                not f and schedule.is_checked(p) for f, p in zip(full, series.pasts, strict=True)
            ]
            output, errors = self._by_forecast(whole, checked)
            limit = schedule.threshold(progress)
            if self._gate.rollback:
                bad = [error is not None and error > limit for error in errors]
                full = [a or b for a, b in zip(full, bad, strict=True)]
        middle = perf_counter() if is_forecast else start
        if any(full):
            output = self._in_full(original, call, whole, full, output)
        check_finite(output, self._step)
        series.pasts = [
            past.after_full_step() if f else past.after_forecast(error)
            for past, f, error in zip(series.pasts, full, errors, strict=True)
        ]
        self.statistics.add_work(series.work, sum(full) / len(full), is_forecast, self._checks)
        spent = (middle - start, perf_counter() - middle)
        made = (tuple(drafted), tuple(full), tuple(errors), limit)
        self.statistics.add_call(NetworkCall(*made, start, spent))
        return output

    def _find(self, arguments: dict[str, Any]) -> CallSeries:
        """The series of a call: the k-th call at one time belongs to series k."""
        step = self._clock.step_at(time_of(arguments))
        self._ordinal = self._ordinal + 1 if step == self._step else 0
        self._step = step
        states = next(iter(arguments.values()))
        if self._ordinal == len(self._series):
            self._series.append(self._begin(states))
        elif self._series[self._ordinal].rows != len(states):
            self._series[self._ordinal] = self._begin(states)  # guidance was switched on or off
        return self._series[self._ordinal]

    def _begin(self, states: Tensor) -> CallSeries:
        rows, groups = len(states), 1
        if not isinstance(states, Tensor) and (self._gate.per_sample or self._forecasts_output):
            raise ValueError(
                "this network takes a list of states, one for each image, so all are forecast or "
                "computed together: use the recipe taylorseer without lite, or speca with "
                "per_sample=False"
            )
        if self._gate.per_sample:
            groups = rows if self._samples is None else self._samples
            if rows % groups:
                raise ValueError(
                    f"the network receives {rows} rows, not a multiple of samples={groups}; attach "
                    "with the number of images of the call"
                )
        start = self._step + self._gate.schedule.warm_up - 1  # as in the published code
        device = tensors(states)[0].device
        histories = rows if groups > 1 else 1  # one for all rows, whatever their arrangement
        timeline = Timeline.begin(
            self._extrapolation.basis, self._extrapolation.order, histories, device, start
        )
        features: list[list[Feature]] = [[] for _ in self._modules.modules]
        if self._forecasts_output:
            features = [[Forecast()]]
        return CallSeries(rows, timeline, features, [SampleHistory()] * groups)

    def _by_forecast(
        self, whole: Callable[[], Any], checked: list[bool]
    ) -> tuple[Any, list[float | None]]:
        """A pass by forecast over all rows, and the errors of the groups that are checked."""
        series, self._checks = self._current, any(checked)
        self._mode, self._weights = Mode.FORECAST, series.timeline.weights(self._step)
        self._calls.clear()
        if self._forecasts_output:
            return series.features[0][0].forecast(self._weights), [None] * len(checked)
        output = whole()
        if not self._checks:
            return output, [None] * len(checked)
        found = self._errors.nan_to_num(nan=float("inf"), posinf=float("inf")).tolist()
        errors = [error if check else None for error, check in zip(found, checked, strict=True)]
        self.statistics.errors += [(self._step, error) for error in errors if error is not None]
        return output, errors

    def _in_full(
        self,
        original: Callable[..., Any],
        call: inspect.BoundArguments,
        whole: Callable[[], Any],
        full: list[bool],
        output: Any,
    ) -> Any:
        """Compute the rows of the groups in `full`; the others are taken from `output`."""
        series, device = self._current, self._current.timeline.nodes.device
        is_full = torch.tensor(full, device=device).repeat(series.rows // len(full))
        rows = is_full.nonzero()[:, 0]
        self._mode, self._rows = Mode.FULL, None if all(full) else rows
        self._calls.clear()
        self._scale = series.timeline.advance(self._step, rows if len(full) > 1 else rows[:1])
        if self._rows is None:
            computed = whole() if series.work else self._count_work(whole)
        else:
            part = select_rows(dict(call.arguments), rows, series.rows)
            call = inspect.BoundArguments(call.signature, part)
            computed = original(*call.args, **call.kwargs)
        if self._forecasts_output:
            series.features[0][0].record(computed, self._scale, self._rows)
        return computed if self._rows is None else replace_rows(output, computed, rows)

    def _count_work(self, whole: Callable[[], Any]) -> Any:
        """The output of a full pass, whose work is counted unless its operations are compiled."""
        if self._forecasts_output:
            self._current.work = PassWork(0.0)
        elif not self._is_compiled:
            skipped = [module for module, _ in self._modules.modules]
            output, self._current.work = count_work(whole, skipped, self._modules.last)
            return output
        return whole()

    def _layer(self, index: int) -> Callable[..., Any]:
        """The forward of one layer inside a block."""

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._mode is Mode.EXACT:
                return original(*args, **kwargs)
            features, call = self._current.features[index], self._calls[index]
            self._calls[index] += 1  # a layer of two streams is called for each
            if self._mode is Mode.FORECAST:
                return features[call].forecast(self._weights)
            if call == len(features):
                features.append(self._modules.modules[index][1]())
            output = original(*args, **kwargs)
            self._check_rows(index, output)
            features[call].record(output, self._scale, self._rows)
            return output

        return forward

    def _check_rows(self, index: int, output: Any) -> None:
        """Raises ValueError if samples have their own histories, but no rows of their own."""
        rows = len(self._scale)
        if rows > 1 and any(len(part) != rows for part in tensors(output)):
            raise ValueError(
                f"a {type(self._modules.modules[index][0]).__name__} of this network returns "
                f"{len(tensors(output)[0])} rows for a batch of {rows}, so its samples cannot be "
                "checked one by one; give per_sample=False"
            )

    def _last_block(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of the last block: by forecast, and computed to measure the error."""
        output = original(*args, **kwargs)
        if self._mode is Mode.FORECAST and self._checks:
            self._mode = Mode.EXACT
            exact = original(*args, **kwargs)
            self._mode = Mode.FORECAST
            groups = len(self._current.pasts)
            self._errors = self._gate.metric(
                flatten_groups(output, groups), flatten_groups(exact, groups)
            )
        return output


BASES: dict[str, Basis] = {"taylor": Taylor(), "newton": Newton()}


def forecast_features(kit: Kit) -> Extrapolation:
    """The options `basis` ("taylor", "newton"), `order`, and `lite` if the recipe has it."""
    options = kit.options
    basis = choose_option("basis", options["basis"], BASES)
    return Extrapolation(basis, options["order"], options.get("lite", False))
