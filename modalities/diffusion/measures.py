"""Benchmark of diffusion pipelines: requests, baselines, quality scores and row costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import signature
from statistics import fmean
from typing import Any

import diffusers
import numpy as np
import torch

from mmspec.api import accelerate
from mmspec.bench.reporting import Progress, dtype_name
from mmspec.bench.workload import repeat_prompts
from mmspec.modalities.common import measures
from mmspec.modalities.diffusion import row_costs
from mmspec.modalities.diffusion.certificates import certify
from mmspec.modalities.diffusion.forecast_runner import ForecastRunner
from mmspec.modalities.diffusion.image_distance import (
    compare_images,
    generate_reference,
    output_images,
)
from mmspec.modalities.diffusion.network import Network
from mmspec.modality import Quality, Runner, RunResult, RunResults, Selection, Speculative, Workload

__all__ = ["certify", "workload"]

OWN, PLAIN = "pipeline", "plain"
DISTANCES = ("relative", "psnr", "psnr_on_ink", "ssim")  # of `ImageDistance`, if lossy
PER_IMAGE = DISTANCES[:3]
COUNTED = 4  # requests whose calls determine the steps of a control
STEPS = "num_inference_steps"
SHARES = (0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the steps, for a frontier
HIDDEN = ("prompt", "class_labels", "batch_size")  # conditions, not sampling settings
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Held-out prompts and image scores for bundled pipelines; the user's prompts otherwise."""
    batch = selection.batch
    if selection.prompts is not None or not formatter.source.startswith("zoo:"):
        groups = repeat_prompts(selection.prompts or ["0"], batch)
        return of_requests(model, [formatter.request(group) for group in groups], batch=batch)
    groups, result = measures.held_out_prompts(selection.count, batch, selection.seed)
    facts = measures.facts_quality(partial(measures.score_images, result))
    return of_requests(model, [formatter.request(group) for group in groups], (facts,), batch)


def of_requests(
    pipe: Any, requests: Sequence[Request], qualities: Sequence[Quality] = (), batch: int = 1
) -> Workload:
    """Workload of requests, arguments of the call; lossy images are compared with plain ones."""
    own: Runner = OwnPipeline(pipe)

    def fewer_step_baselines(
        recipes: Mapping[str, Runner], seed: int, progress: Progress
    ) -> tuple[Mapping[str, Runner], Mapping[str, str]]:
        """For each lossy recipe, the pipeline in as many steps as the recipe calls the network."""
        found: dict[str, Runner] = {}
        for done, one in enumerate(recipes.values()):
            counted = [one.run(request, seed) for request in requests[:COUNTED]]
            steps = max(round(fmean(one.calls for one in counted)), 1)
            if not counted[0].exact and steps < len(pipe.scheduler.timesteps):
                found[f"pipeline, {steps} steps"] = OwnPipeline(pipe, steps)
            progress("count calls", done + 1, len(recipes))
        return found, {}

    try:  # a window of one drafts nothing with any scheduler
        plain: Runner = PlainPipeline(accelerate(pipe, "paradigms", window=1))
    except ValueError:  # then only forecasts can run
        plain = own
    return Workload(
        timed=requests,
        plain=plain,
        fast=SpeculativePipeline,
        baselines={OWN: own},
        fewer_steps=_fewer_steps(pipe, requests[0]),
        peers=fewer_step_baselines if STEPS in signature(pipe.__call__).parameters else None,
        qualities=(
            *qualities,
            *(Quality(name, partial(_image_distance, name)) for name in DISTANCES),
        ),
        extras=_extras(pipe, requests[0]),
        batch=batch,
        device=torch.device(pipe._execution_device),
        settings={name: value for name, value in requests[0].items() if name not in HIDDEN},
        environment={
            "diffusers": diffusers.__version__,
            "dtype": dtype_name(pipe.dtype),
            "scheduler": type(pipe.scheduler).__name__,
        },
    )


def _fewer_steps(pipe: Any, request: Request) -> Mapping[int, Runner]:
    """The pipeline's own call in fewer steps, if it takes their number."""
    known = signature(pipe.__call__).parameters
    total = request.get(STEPS) or (known[STEPS].default if STEPS in known else None)
    if not isinstance(total, int):
        return {}
    counts = sorted({round(total * share) for share in SHARES})
    return {steps: OwnPipeline(pipe, steps) for steps in counts if 1 < steps < total}


@dataclass(frozen=True)
class SeededPictures:
    """Images, and the label of the noise they were sampled with."""

    pixels: np.ndarray  # (B, ..., H, W, 3) floats in [0, 1]
    noise: str

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.pixels)


class SpeculativePipeline(Speculative):
    """An accelerated pipeline. Recipes that forecast keep the pipeline's loop and noise."""

    def run(self, request: Request, seed: int) -> RunResult:
        with _count_rows(self.fast.model) as counts:
            images = output_images(self.fast(**request, seed=seed, output_type="np"))
        stats = self.fast.last_stats
        assert stats is not None
        forecasts = isinstance(self.fast.session.runner, ForecastRunner)
        full = stats.target_calls / max(stats.num_new_tokens, 1)
        rows = float(sum(counts) * full if forecasts else stats.network_rows)
        result = SeededPictures(images, OWN if forecasts else PLAIN)
        return RunResult(None, len(images), stats.target_calls, stats.exact, result, stats, rows)


class PlainPipeline(Speculative):
    """The loop without drafts, which is exact for any recipe."""

    def run(self, request: Request, seed: int) -> RunResult:
        return replace(SpeculativePipeline(self.fast).run(request, seed), exact=True)


@dataclass(frozen=True)
class OwnPipeline(Runner):
    """The pipeline's own call, in the requested number of steps or in fewer."""

    pipe: Any
    steps: int | None = None

    def run(self, request: Request, seed: int) -> RunResult:
        fewer = {} if self.steps is None else {STEPS: self.steps}
        with _count_rows(self.pipe) as counts:
            images = generate_reference(self.pipe, {**request, **fewer}, seed)
        steps, result = len(self.pipe.scheduler.timesteps), SeededPictures(images, OWN)
        return RunResult(
            None,
            *(len(images), steps, self.steps is None),
            output=result,
            network_rows=float(sum(counts)),
        )


@contextmanager
def _count_rows(pipe: Any) -> Iterator[list[int]]:
    """Collect the rows of every call of the pipeline's network."""
    rows: list[int] = []

    def record(_: Any, args: Any, kwargs: Any) -> None:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        rows.append(len(tensors[0]))

    handle = Network(pipe).module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def _image_distance(
    name: str, answers: Sequence[RunResult], others: RunResults
) -> list[tuple[float, float]]:
    """Distance of lossy images from those sampled with the same noise, over all requests."""
    references = others.get(answers[0].output.noise, ())
    if answers[0].exact or not references:
        return []
    pixels = [np.concatenate([one.output.pixels for one in side]) for side in (references, answers)]
    found = vars(compare_images(*pixels))[name]
    return [] if found is None else [(found, 1.0)]


def _differences_per_image(
    answers: Sequence[RunResult], others: RunResults
) -> dict[str, dict[str, list[float | None]]]:
    """What a lossy recipe changed and computed, image by image, in the order of the requests.

    Distances are from the image sampled in sequence with the same noise (None: equal, or no ink);
    calls are those of the image's request.
    """
    references = others.get(answers[0].output.noise, ())
    if answers[0].exact or not references:
        return {}
    found = [
        (one.calls, compare_images(wanted[None], image[None]))
        for one, reference in zip(answers, references, strict=True)
        for wanted, image in zip(reference.output.pixels, one.output.pixels, strict=True)
    ]
    return {
        "per image": {
            "calls": [calls for calls, _ in found],
            **{name: [vars(one)[name] for _, one in found] for name in PER_IMAGE},
        }
    }


def _find_better_control(answers: Sequence[RunResult], others: RunResults) -> str | None:
    """The pipeline in no more steps, if its images are nearer to those of all steps."""
    mine, calls = _distance_on_ink(answers, others), round(fmean(one.calls for one in answers))
    for name, control in others.items():
        is_control = name.startswith(f"{OWN}, ") and control[0].calls <= calls
        if is_control and _distance_on_ink(control, others) < mine:
            return name
    return None


def _distance_on_ink(answers: Sequence[RunResult], others: RunResults) -> float:
    """Mean squared error in decibel; minus infinity for equal images."""
    found = _image_distance("psnr_on_ink", answers, others) or _image_distance(
        "psnr", answers, others
    )
    return -found[0][0] if found else -math.inf


def _extras(pipe: Any, request: Request) -> Any:
    """Cost of states per call, measured once, and the speed-up that follows."""

    @cache
    def measure_costs() -> row_costs.Costs:
        return row_costs.measure(pipe, request)

    def extras(answers: Sequence[RunResult], others: RunResults) -> dict[str, Any]:
        own, first = others.get(OWN, ()), answers[0]
        if not own or first.stats is None:
            return {}
        if first.output.noise == OWN:
            skipped = [one.stats.skipped_work for one in answers if one.stats is not None]
            known = [share for share in skipped if share is not None]
            better = _find_better_control(answers, others)
            return {
                **({"skipped work": fmean(known)} if known else {}),
                **({"beaten by": better} if better else {}),
                **_differences_per_image(answers, others),
            }
        costs, pictures_ = measure_costs(), fmean(one.count for one in answers)
        fast_rows, own_rows = (_rows_per_call(side) for side in (answers, own))
        states, calls = fast_rows / own_rows * pictures_, fmean(one.calls for one in answers)
        return {
            "row_costs": costs.relative(),
            "states_per_call": states,
            "speedup_from_row_costs": fmean(one.calls for one in own)
            * costs.at(pictures_)
            / (calls * costs.at(states)),
            **_differences_per_image(answers, others),
        }

    return extras


def _rows_per_call(answers: Sequence[RunResult]) -> float:
    return sum(one.network_rows or 0.0 for one in answers) / sum(one.calls for one in answers)
