"""The benchmark of pipelines: a recipe against the pipeline's own call, and plain sampling."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mmspec import recipes
from mmspec.api import Accelerated, accelerate
from mmspec.bench import pool, rows
from mmspec.bench.environment import device_name, peak_memory_bytes
from mmspec.bench.pictures import Apart, apart, own_pictures, pictures
from mmspec.bench.progress import Progress, silent
from mmspec.bench.timing import Ratio
from mmspec.bench.turns import Drawn, Player, race
from mmspec.drafters.denoising.window import Window
from mmspec.modalities.diffusion.network import Network
from mmspec.recipe import Recipe

PLAIN = "paradigms"  # with a window of one it drafts nothing, whatever the scheduler
Quality = Callable[[Sequence[np.ndarray]], float]  # of one array of pictures per request


@dataclass(frozen=True)
class Drawing:
    """Calls to make: arguments of each, and a judge of the pictures if there is one."""

    requests: Sequence[Mapping[str, Any]]
    metric: str = "none"
    quality: Quality | None = None


@dataclass(frozen=True)
class LatentComparison:
    """What `mmspec bench` reports of a pipeline. Speed-ups are ratios of seconds, medians.

    `calls_saved` is the share of the network calls of plain sampling that the recipe does without;
    its draft model is not counted. `speedup_if_rows_were_free` is what hardware would show on which
    a call costs the same whatever its rows; `speedup_from_row_costs` puts in what rows cost here.
    """

    recipe: str
    model: str
    drafter: str | None
    exact: bool  # what the recipe claims
    steps: int
    speedup_over_pipeline: float
    speedup_over_plain: float | None  # None where the recipe keeps the pipeline's own loop
    calls_plain: float  # network calls per request
    calls: float
    calls_saved: float
    rows_plain: float  # network rows per request
    rows: float
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    row_costs: dict[int, float]  # of a call by its number of states, in calls of one state
    states_per_call: float | None
    speedup_if_rows_were_free: float
    speedup_from_row_costs: float | None
    draft_share: float | None  # of the time in rounds
    quality_metric: str
    quality_pipeline: float | None
    quality_method: float | None
    relative_distance: float | None  # lossy: to the pictures of the same seeds
    psnr: float | None
    ssim: float | None
    spread: dict[str, list[float]]  # least and most of the repeats
    seconds_per_request: dict[str, float]
    requests: int
    repeats: int
    peak_memory_bytes: int
    environment: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def compare_latents(
    pipe: Any,
    recipe: str | Recipe,
    drawing: Drawing,
    *,
    drafter: Any = None,
    names: tuple[str, str | None] = ("model", None),
    repeats: int = 5,
    seed: int = 0,
    progress: Progress = silent,
    **parts: Any,
) -> LatentComparison:
    """Measure a recipe on a pipeline; everybody draws everything in turns, after a warm-up.

    `parts` are those that `accelerate` takes for it: a window, a tree, the recipe's options.
    """
    plan = recipes.get(recipe) if isinstance(recipe, str) else recipe
    players: dict[str, Player] = {"pipeline": Own(pipe)}
    if isinstance(plan.execution, Window):
        players["plain"] = Fast(accelerate(pipe, PLAIN, window=1))
    players["method"] = Fast(accelerate(pipe, plan, drafter=drafter, **parts))
    laps, _ = race(players, drawing.requests, repeats, seed, _device(pipe), progress)
    costs = _costs(pipe, drawing, plan)
    counted = _counts(laps["method"].stats, plan, _count(pipe, drawing, seed))
    over = {
        name: Ratio.of(laps[name].seconds, laps["method"].seconds)
        for name in players
        if name != "method"
    }
    lossy = (
        None if plan.exact else _apart(laps[_reference(players)].pictures, laps["method"].pictures)
    )
    judge = drawing.quality
    states = counted.rows / counted.calls * counted.calls_plain / counted.rows_plain
    return LatentComparison(
        recipe=plan.name or "custom",
        model=names[0],
        drafter=names[1] if plan.takes_drafter else None,
        exact=plan.exact,
        steps=counted.steps,
        speedup_over_pipeline=over["pipeline"].median,
        speedup_over_plain=over["plain"].median if "plain" in over else None,
        calls_plain=counted.calls_plain,
        calls=counted.calls,
        calls_saved=1 - counted.calls / counted.calls_plain,
        rows_plain=counted.rows_plain,
        rows=counted.rows,
        mean_acceptance_length=counted.mean_length,
        draft_acceptance_rate=counted.rate,
        acceptance_histogram=counted.histogram,
        row_costs={} if costs is None else costs.relative(),
        states_per_call=None if costs is None else states * counted.pictures,
        speedup_if_rows_were_free=counted.calls_plain / counted.calls,
        speedup_from_row_costs=None
        if costs is None
        else (
            counted.calls_plain
            * costs.at(counted.pictures)
            / (counted.calls * costs.at(states * counted.pictures))
        ),
        draft_share=counted.draft_share,
        quality_metric=drawing.metric,
        quality_pipeline=judge(laps["pipeline"].pictures) if judge else None,
        quality_method=judge(laps["method"].pictures) if judge else None,
        relative_distance=None if lossy is None else lossy.relative,
        psnr=None if lossy is None else lossy.psnr,
        ssim=None if lossy is None else lossy.ssim,
        spread={f"speedup_over_{name}": ratio.spread for name, ratio in over.items()},
        seconds_per_request={
            name: min(lap.seconds) / len(drawing.requests) for name, lap in laps.items()
        },
        requests=len(drawing.requests),
        repeats=repeats,
        peak_memory_bytes=peak_memory_bytes(_device(pipe)),
        environment=_environment(pipe),
    )


@dataclass(frozen=True)
class Own:
    """The pipeline as it is."""

    pipe: Any

    def draw(self, asked: Mapping[str, Any], seed: int) -> Drawn:
        return Drawn(own_pictures(self.pipe, asked, seed))


@dataclass(frozen=True)
class Fast:
    """An accelerated pipeline."""

    fast: Accelerated

    def draw(self, asked: Mapping[str, Any], seed: int) -> Drawn:
        output = self.fast(**asked, seed=seed, output_type="np")
        return Drawn(pictures(output), self.fast.last_stats)


@dataclass(frozen=True)
class Counts:
    """Means per request."""

    pictures: float
    steps: int
    calls_plain: float
    rows_plain: float
    calls: float = 0.0
    rows: float = 0.0
    mean_length: float | None = None
    rate: float | None = None
    histogram: list[int] = field(default_factory=list)
    draft_share: float | None = None


def _count(pipe: Any, drawing: Drawing, seed: int) -> Counts:
    """Calls and rows of the pipeline's own network in its own call of the first request."""
    seen: list[int] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        seen.append(len(tensors[0]))

    handle = Network(pipe).module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        drawn = own_pictures(pipe, drawing.requests[0], seed)
    finally:
        handle.remove()
    steps = len(pipe.scheduler.timesteps)
    return Counts(len(drawn), steps, float(len(seen)), float(sum(seen)))


def _counts(stats: Sequence[Any], plan: Recipe, plain: Counts) -> Counts:
    many = len(stats)
    if not isinstance(plan.execution, Window):
        full = sum(one.target_calls for one in stats)
        share = full / sum(one.num_new_tokens for one in stats)
        return replace(plain, calls=share * plain.calls_plain, rows=share * plain.rows_plain)
    drafted = sum(one.num_draft_tokens for one in stats)
    accepted = sum(one.num_accepted_draft_tokens for one in stats)
    return replace(
        plain,
        calls_plain=float(plain.steps),
        calls=sum(one.target_calls for one in stats) / many,
        rows=sum(one.network_rows for one in stats) / many,
        mean_length=pool.mean_acceptance_length(stats),
        rate=accepted / drafted if drafted else 0.0,
        histogram=pool.histogram(stats),
        draft_share=pool.shares(stats)["draft"],
    )


def _costs(pipe: Any, drawing: Drawing, plan: Recipe) -> rows.Costs | None:
    """What rows cost; None where the recipe asks for no more of them."""
    if not isinstance(plan.execution, Window):
        return None
    return rows.measure(pipe, drawing.requests[0])


def _apart(wanted: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> Apart:
    return apart(np.concatenate(wanted), np.concatenate(found))


def _reference(players: Mapping[str, Player]) -> str:
    """Who draws with the noise of the recipe."""
    return "plain" if "plain" in players else "pipeline"


def _device(pipe: Any) -> torch.device:
    return torch.device(pipe._execution_device)


def _environment(pipe: Any) -> dict[str, Any]:
    import diffusers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "device": device_name(_device(pipe)),
        "threads": torch.get_num_threads(),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "scheduler": type(pipe.scheduler).__name__,
    }
