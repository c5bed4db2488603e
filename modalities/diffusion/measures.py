"""How pipelines are measured: prompts, judges, the pipeline's own call, and what rows cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean
from typing import Any

import diffusers
import numpy as np
import torch

from mmspec.api import accelerate
from mmspec.bench.environment import dtype_name
from mmspec.bench.workload import repeated
from mmspec.modalities.common import scenes
from mmspec.modalities.diffusion import row_costs
from mmspec.modalities.diffusion.certificates import certify
from mmspec.modalities.diffusion.forecasts import ForecastRunner
from mmspec.modalities.diffusion.network import Network
from mmspec.modalities.diffusion.picture_distance import apart, own_pictures, pictures
from mmspec.modality import Quality, Runner, RunResult, RunResults, Selection, Speculative, Workload

__all__ = ["certify", "workload"]

OWN, PLAIN = "pipeline", "plain"
DISTANCES = ("relative", "psnr", "ssim")  # fields of `Apart`, of lossy recipes only
HIDDEN = ("prompt", "class_labels", "batch_size")  # what is drawn, and not how
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Held-out prompts for pipelines of the zoo, judged by reading pictures; else the user's."""
    batch = selection.batch
    if selection.prompts is not None or not formatter.source.startswith("zoo:"):
        groups = repeated(selection.prompts or ["0"], batch)
        return of_requests(model, [formatter.request(group) for group in groups], batch=batch)
    groups, shown = scenes.held_out(selection.count, batch, selection.seed)
    facts = scenes.judged_by(partial(scenes.facts, shown))
    return of_requests(model, [formatter.request(group) for group in groups], (facts,), batch)


def of_requests(
    pipe: Any, requests: Sequence[Request], qualities: Sequence[Quality] = (), batch: int = 1
) -> Workload:
    """Requests are arguments of the pipeline's call; lossy pictures are held against plain ones."""
    own: Runner = OwnPipeline(pipe)
    try:  # a window of one drafts nothing, whatever the scheduler
        plain: Runner = PlainPipeline(accelerate(pipe, "paradigms", window=1))
    except ValueError:  # then nothing but forecasts can run either
        plain = own
    return Workload(
        timed=requests,
        plain=plain,
        fast=SpeculativePipeline,
        baselines={OWN: own},
        qualities=(*qualities, *(Quality(name, partial(_apart, name)) for name in DISTANCES)),
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


@dataclass(frozen=True)
class SeededPictures:
    """Pictures, and whose noise they were drawn with."""

    pixels: np.ndarray  # (B, ..., H, W, 3) floats in [0, 1]
    noise: str

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.pixels)


class SpeculativePipeline(Speculative):
    """An accelerated pipeline. Recipes that forecast keep the pipeline's own loop and noise."""

    def run(self, request: Request, seed: int) -> RunResult:
        with _rows(self.fast.model) as seen:
            made = pictures(self.fast(**request, seed=seed, output_type="np"))
        stats = self.fast.last_stats
        assert stats is not None
        forecasts = isinstance(self.fast.session.runner, ForecastRunner)
        full = stats.target_calls / max(stats.num_new_tokens, 1)
        rows = float(sum(seen) * full if forecasts else stats.network_rows)
        shown = SeededPictures(made, OWN if forecasts else PLAIN)
        return RunResult(None, len(made), stats.target_calls, stats.exact, shown, stats, rows)


class PlainPipeline(Speculative):
    """Our loop drafting nothing, which is exact whatever its recipe would do with a draft."""

    def run(self, request: Request, seed: int) -> RunResult:
        return replace(SpeculativePipeline(self.fast).run(request, seed), exact=True)


@dataclass(frozen=True)
class OwnPipeline(Runner):
    """The pipeline as it is."""

    pipe: Any

    def run(self, request: Request, seed: int) -> RunResult:
        with _rows(self.pipe) as seen:
            made = own_pictures(self.pipe, request, seed)
        steps, shown = len(self.pipe.scheduler.timesteps), SeededPictures(made, OWN)
        return RunResult(None, len(made), steps, output=shown, network_rows=float(sum(seen)))


@contextmanager
def _rows(pipe: Any) -> Iterator[list[int]]:
    """Rows of every call of the pipeline's network."""
    seen: list[int] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        seen.append(len(tensors[0]))

    handle = Network(pipe).module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _apart(
    name: str, answers: Sequence[RunResult], others: RunResults
) -> list[tuple[float, float]]:
    """How far lossy pictures are from those of the same noise, all together."""
    wanted = others.get(answers[0].output.noise, ())
    if answers[0].exact or not wanted:
        return []
    pixels = [np.concatenate([one.output.pixels for one in side]) for side in (wanted, answers)]
    found = vars(apart(*pixels))[name]
    return [] if found is None else [(found, 1.0)]


def _extras(pipe: Any, request: Request) -> Any:
    """What more states per call cost, and the speed-up that follows; measured once."""

    @cache
    def measured() -> row_costs.Costs:
        return row_costs.measure(pipe, request)

    def extras(answers: Sequence[RunResult], others: RunResults) -> dict[str, Any]:
        own, first = others.get(OWN, ()), answers[0]
        if not own or first.stats is None or first.output.noise == OWN:
            return {}
        costs, pictures_ = measured(), fmean(one.count for one in answers)
        mine, theirs = (_rows_per_call(side) for side in (answers, own))
        states, calls = mine / theirs * pictures_, fmean(one.calls for one in answers)
        return {
            "row_costs": costs.relative(),
            "states_per_call": states,
            "speedup_from_row_costs": fmean(one.calls for one in own)
            * costs.at(pictures_)
            / (calls * costs.at(states)),
        }

    return extras


def _rows_per_call(answers: Sequence[RunResult]) -> float:
    return sum(one.network_rows or 0.0 for one in answers) / sum(one.calls for one in answers)
