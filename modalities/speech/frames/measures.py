"""Workloads and certificates of audio models of several codebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench import checks
from mmspec.bench.certificate import Check, Trial, outcome
from mmspec.bench.frequency import Subject
from mmspec.bench.workload import repeat_prompts
from mmspec.drafters.plain import NoDraft
from mmspec.modalities.common import measures
from mmspec.modalities.speech.audio_quality import (
    ReferenceAudio,
    recognition_quality,
    speech_timing,
)
from mmspec.modalities.speech.frames import tiny_models
from mmspec.modalities.speech.speech_loop import Speech
from mmspec.modality import Runner, RunResult, Selection, Speculative, Workload
from mmspec.recipe import Recipe

TEXTS = ("A calm piano over soft rain.",)
MAX_SAMPLES = 500  # of a tiny model
TOLERANCE = 1e-4  # of waveforms: rounding of the same codes in other batches
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """The user's prompts, by default a text for music models."""
    batch = selection.batch
    prompts = repeat_prompts(selection.prompts or TEXTS, batch)
    requests = [formatter.request(group) for group in prompts]
    return of_requests(model, requests, batch, formatter.processor)


def of_requests(
    model: Any, requests: Sequence[Request], batch: int = 1, processor: Any = None
) -> Workload:
    """A workload of arguments of `synthesize`."""
    plain = accelerate(model, "frame-plain", processor=processor)
    qualities, missing = recognition_quality(requests)
    more = {"missing": missing, "qualities": qualities, "extras": speech_timing, "batch": batch}
    return measures.race_workload(requests, plain, SpeculativeFrames, OwnFrames, **more)


class SpeculativeFrames(Speculative):
    """Our loop with some recipe."""

    def run(self, request: Request, seed: int) -> RunResult:
        out: Speech = self.fast.synthesize(**request, seed=seed)
        stats, codes = out.stats, [row.T.tolist() for row in out.codes]
        return RunResult(codes, stats.num_new_tokens, stats.target_calls, stats.exact, out, stats)


@dataclass(frozen=True)
class OwnFrames(Runner):
    """The model's own `generate()`, which returns waveforms."""

    plain: Accelerated

    def run(self, request: Request, seed: int) -> RunResult:
        session = self.plain.session
        inputs, options = session.prepare_arguments(request)
        torch.manual_seed(seed)
        waveforms = session.reader.generate_audio(inputs, options, session.codec)
        sound = ReferenceAudio(waveforms, session.codec.sampling_rate)
        frames = sum(len(one) // session.codec.hop for one in waveforms)
        steps = session.reader.steps(frames // len(waveforms))
        return RunResult(None, len(waveforms) * steps, steps - 1, output=sound)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Frequency tests on tiny models of both kinds, equality tests on the user's model if given.

    Raises ValueError for a recipe that cannot be bound to them.
    """
    small = dict[str, Accelerated]()
    for name in tiny_models.MODELS:
        try:
            small[name] = tiny_models.bind_recipe(recipe, name, 0)
        except ValueError:
            if name == list(tiny_models.MODELS)[-1] and not small:
                raise
    return next(iter(small.values())).recipe, _checks(recipe, small, trial)


def _checks(recipe: Recipe, small: Mapping[str, Accelerated], trial: Trial) -> Iterator[Check]:
    models = {"this model": trial.fast} if trial.fast is not None else small
    for name, fast in models.items():
        plan, mine = fast.recipe, SpeculativeFrames(fast)
        requests = trial.requests or [tiny_models.tiny_request(name)]
        yield _greedy(name, fast, requests)
        plain: Runner | None = None
        if not isinstance(fast.session.drafter, NoDraft):
            other = accelerate(fast.model, "frame-plain", processor=fast.session.processor)
            plain = SpeculativeFrames(other)
        found = checks.seeded_equality(plan, plain, mine, requests, trial)
        yield Check(f"seeded equality, {name}", found.outcome, found.detail)
    few = replace(trial, samples=min(trial.samples, MAX_SAMPLES))  # rows are decoded one by one
    for name in small:
        found = checks.frequency(small[name].recipe, partial(_subject, recipe, name), few, "codes")
        yield Check(f"frequencies, {name}", found.outcome, found.detail, found.distance)


def _subject(recipe: Recipe, name: str, seed: int) -> Subject:
    return tiny_models.speech_subject(tiny_models.bind_recipe(recipe, name, seed), name)


def _greedy(name: str, fast: Accelerated, requests: Sequence[Request]) -> Check:
    """Compare greedy waveforms with those of the model's own `generate()`."""
    largest = 0.0
    for request in requests:
        greedy = {**{n: v for n, v in request.items() if n != "temperature"}, "do_sample": False}
        mine: Speech = fast.synthesize(**greedy)
        expected = OwnFrames(fast).run(greedy, 0).output.waveforms
        for one, other in zip(mine.waveforms, expected, strict=True):
            is_same = len(one) == len(other)
            difference = (one - other).abs().amax() if is_same and len(one) else float(not is_same)
            largest = max(largest, float(difference))
    detail = f"samples differ from those of generate() by {largest:.1e} at most"
    return Check(f"greedy equality, {name}", outcome(fast.recipe, largest <= TOLERANCE), detail)
