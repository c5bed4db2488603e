"""Run a diffusers pipeline with forecast network outputs: its own loop, whose steps are rounds.

A step that was computed is a round without a draft; a step by forecast is a draft of one state that
was accepted without the target; a rejected forecast is a refused draft.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from time import perf_counter
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmspec.draft import Draft, Kind, Round, Verdict
from mmspec.drafters.forecast.attached import NetworkCall, Statistics
from mmspec.modalities.diffusion.forecast_states import ForecastStates, take_row
from mmspec.modalities.diffusion.network import count_images
from mmspec.modality import Loop
from mmspec.recipe import Kit, Recipe, resolve
from mmspec.stats import forecast_stats

log = logging.getLogger("mmspec")
MAX_FORECAST_WORK = 0.5  # of a full step, without a warning


@runtime_checkable
class Measuring(Protocol):
    """An architecture with options that its first call measures."""

    @property
    def measured(self) -> Mapping[str, Any]: ...
    @property
    def least_steps(self) -> int: ...  # of a call that measures


class ForecastRunner:
    """A pipeline whose network outputs are forecast by a recipe.

    Statistics count a full step as a target call, an unverified forecast as an accepted draft, and
    a rejected forecast as a rejected draft.
    """

    own = ("seed",)
    sees = "nothing"

    def __init__(self, pipe: Any, recipe: Recipe) -> None:
        kit = Kit(pipe, None, recipe.execution, recipe.sees, None, recipe.options)
        self.pipe, self.recipe, self.warned = pipe, recipe, False
        self.gate: Any = resolve(recipe.verifier, kit)
        self.forecasting = recipe.architecture(kit).under(self.gate)

    @property
    def measured(self) -> Mapping[str, Any]:
        """Options of the recipe that an earlier call has measured."""
        return self.forecasting.measured if isinstance(self.forecasting, Measuring) else {}

    def count_fewest(self, steps: int) -> int:
        """The fewest steps that are computed in full: all of a call too short to measure."""
        made = self.forecasting
        if isinstance(made, Measuring) and not made.measured and steps < made.least_steps:
            return steps
        return int(self.gate.count_fewest(steps))

    def run(self, given: Mapping[str, Any], own: Mapping[str, Any], loop: Loop) -> Any:
        """The pipeline's output."""
        seed = own["seed"]
        if seed is not None and given.get("generator") is not None:
            raise ValueError("seed= and generator= both set the noise; give one of them")
        noise = GlobalNoise(seed)
        detach = self.forecasting.attach(self.pipe, count_images(given))
        steps = None
        if loop.is_watched:
            steps = StepRounds(self.pipe, given, detach.statistics, loop, noise)
        try:
            with noise:
                output = self.pipe(**noise.add_generator(given))
        finally:
            detach()
            if steps is not None:
                steps.restore()
        if steps is not None:
            steps.check_all_shown()
        self._report(detach.statistics, loop)
        return output

    def _report(self, done: Statistics, loop: Loop) -> None:
        """Report the statistics; warn once if forecasts leave most of the network's work."""
        name = self.recipe.name or "custom"
        counts = (done.full, done.forecast, done.rejected, done.errors, done.skipped_work)
        loop.report(forecast_stats(name, *counts))
        if self.warned:
            return
        has_measured = done.measures and bool(self.measured)
        if done.full > 1 and not done.forecast and not has_measured:
            self.warned = True
            log.warning(
                "%r forecast nothing in this call (%d steps in full, %d forecasts rejected), so "
                "this is the pipeline itself; raise the threshold or interval, or sample more "
                "steps than the warm-up (`mmspec show %s` lists the options)",
                *(name, done.full, done.rejected, name),
            )
        elif done.forecast_work > MAX_FORECAST_WORK:
            self.warned = True
            log.warning(
                "a forecast step of this network still computes %.0f %% of the operations of a "
                "full step, outside of the layers that %r skips; the recipe taylorseer with "
                "lite=True skips the whole network",
                *(100 * done.forecast_work, name),
            )


class StepRounds:
    """Shows every step of a pipeline's scheduler as a round, until it is restored."""

    def __init__(
        self,
        pipe: Any,
        given: Mapping[str, Any],
        statistics: Statistics,
        loop: Loop,
        noise: GlobalNoise,
    ) -> None:
        self.scheduler, self.statistics, self.loop = pipe.scheduler, statistics, loop
        self.states, self.noise = ForecastStates(pipe, given), noise
        self.index = self.shown = 0  # of the next round, and network calls in earlier ones
        self.start = perf_counter()  # of this round
        self.is_showing = False
        self.replaced = vars(self.scheduler).get("step")
        original = type(self.scheduler).step if self.replaced is None else self.replaced.__func__

        @wraps(original)  # pipelines inspect the signature
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(scheduler, *args, **kwargs)
            if scheduler is self.scheduler:  # and not a copy of it, of another modality
                state = output[0] if isinstance(output, tuple) else output.prev_sample
                self.show(state)
            return output

        self.scheduler.step = MethodType(step, self.scheduler)  # a deep copy binds its own

    def restore(self) -> None:
        """Give the scheduler its own step back."""
        if self.replaced is None:
            del self.scheduler.step
        else:
            self.scheduler.step = self.replaced

    def check_all_shown(self) -> None:
        """Raises ValueError if the network was called behind the last step."""
        if self.shown < len(self.statistics.calls):
            raise ValueError(
                f"the network was called {len(self.statistics.calls) - self.shown} times without a "
                "step of the pipeline's scheduler, so its steps cannot be shown; drop on_round=, "
                "trace= and stream()"
            )

    def show(self, state: Tensor) -> None:  # (B, *E), after the step
        """Show the step that the latest calls of the network led to.

        Raises ValueError for a step of another call of the pipeline, made while a round is shown.
        """
        if self.is_showing:
            raise ValueError(
                "the pipeline was called while a round of it is shown, and has one scheduler; call "
                "it after the stream has ended or was closed, or load a second pipeline"
            )
        calls = self.statistics.calls[self.shown :]
        if not calls:  # a second part of a step, of the same output
            return
        self.shown += len(calls)
        state = state[: count_images(self.states.arguments)]  # further rows are those of guidance
        round_, draft = make_round(self.index, state.detach().clone(), calls)
        self.states.add(self.scheduler.timesteps, self.index, calls, len(state))
        first = min(one.start for one in calls)
        seconds = self._measure(calls, first if self.index == 0 else None)
        self.index += 1
        self.is_showing = True
        try:
            with self.noise.pause():
                self.loop.show(replace(round_, seconds=seconds), draft, self.states)
        finally:
            self.is_showing = False
        self.start = perf_counter()

    def _measure(self, calls: list[NetworkCall], first: float | None) -> dict[str, float]:
        """Seconds of a round by part; those before the first call are the prompt's."""
        draft, verify = (sum(one.seconds[part] for one in calls) for part in (0, 1))
        begin = self.start if first is None else first
        seconds = {"prefill": 0.0 if first is None else first - self.start}
        host = max(perf_counter() - begin - draft - verify, 0.0)
        return {**seconds, "draft": draft, "verify": verify, "host": host}


def make_round(index: int, state: Tensor, calls: list[NetworkCall]) -> tuple[Round, Draft]:
    """The round of one step of a scheduler, and its draft; `state` (B, *E) is after the step."""
    rows = range(len(state))
    drafted = [any(take_row(one.forecast, row) for one in calls) for row in rows]
    computed = [any(take_row(one.computed, row) for one in calls) for row in rows]
    accepted = [int(a and not b) for a, b in zip(drafted, computed, strict=True)]
    device = state.device
    path = torch.tensor([[one - 1] for one in accepted], device=device)
    following = state if any(computed) else None
    verdict = Verdict(path, torch.tensor(accepted, device=device), following)
    mask = torch.tensor(drafted, device=device)[:, None]
    draft = Draft.chain(state[:, None], Kind.DET, None, mask)
    round_ = Round(
        index=index,
        drafted=tuple(map(int, drafted)),
        accepted=tuple(accepted),
        path=tuple((0,) if one else () for one in accepted),
        takes_next=tuple(not one for one in accepted),
        tokens=tuple((one,) for one in state),
        finished=(False,) * len(state),
        verdict=verdict,
        depth=int(any(drafted)),
        calls=sum(any(one.computed) for one in calls),
    )
    return round_, draft


class GlobalNoise:
    """Draws all noise of a call of a pipeline from `seed`; None = as the pipeline is given it.

    Also seeds the global generator during the call, because some schedulers use it.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def __enter__(self) -> GlobalNoise:
        if self.seed is not None:
            self.outside = get_noise()
            torch.manual_seed(int(self.seed))
        return self

    def __exit__(self, *error: object) -> None:
        if self.seed is not None:
            set_noise(self.outside)

    def add_generator(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of the call, with a generator of the seed."""
        if self.seed is None:
            return given
        return {**given, "generator": torch.Generator().manual_seed(int(self.seed))}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let others draw from the global generators meanwhile, without changing the call."""
        if self.seed is None:
            yield
            return
        inside = get_noise()
        set_noise(self.outside)
        try:
            yield
        finally:
            self.outside = get_noise()
            set_noise(inside)


def get_noise() -> tuple[Tensor, list[Tensor]]:
    """The states of the global generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all()


def set_noise(states: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state_all(states[1])


def call_seeded(pipe: Any, given: Mapping[str, Any], seed: int) -> Any:
    """Call a pipeline with all of its noise drawn from `seed`."""
    noise = GlobalNoise(seed)
    with noise:
        return pipe(**noise.add_generator(given))
