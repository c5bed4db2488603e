"""How models of several codebooks are measured: what they say, and who says it beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mmspec.api import Accelerated, accelerate
from mmspec.bench import checks
from mmspec.bench.certificate import Check, Trial, outcome
from mmspec.bench.frequency import Subject
from mmspec.bench.workload import repeated
from mmspec.drafters.plain import Silent
from mmspec.modalities.common import measures
from mmspec.modalities.speech.frames import toys
from mmspec.modalities.speech.judging import OwnAudio, heard, timing
from mmspec.modalities.speech.spoken import Speech
from mmspec.modality import Runner, RunResult, Selection, Speculative, Workload
from mmspec.recipe import Recipe

TEXTS = ("A calm piano over soft rain.",)
MOST = 500  # samples of a tiny model
APART = 1e-4  # of samples: rounding of the same codes in other batches
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """What the user asks for, or a text that suits models that play."""
    batch = selection.batch
    asked = repeated(selection.prompts or TEXTS, batch)
    requests = [formatter.request(group) for group in asked]
    return of_requests(model, requests, batch, formatter.processor)


def of_requests(
    model: Any, requests: Sequence[Request], batch: int = 1, processor: Any = None
) -> Workload:
    """Requests are arguments of `synthesize`."""
    plain = accelerate(model, "frame-plain", processor=processor)
    qualities, missing = heard(requests)
    more = {"missing": missing, "qualities": qualities, "extras": timing, "batch": batch}
    return measures.raced(requests, plain, SpeculativeFrames, OwnFrames, **more)


class SpeculativeFrames(Speculative):
    """Our loop with some recipe."""

    def run(self, request: Request, seed: int) -> RunResult:
        out: Speech = self.fast.synthesize(**request, seed=seed)
        stats, codes = out.stats, [row.T.tolist() for row in out.codes]
        return RunResult(codes, stats.num_new_tokens, stats.target_calls, stats.exact, out, stats)


@dataclass(frozen=True)
class OwnFrames(Runner):
    """The model's own `generate()`, which hands out sound."""

    plain: Accelerated

    def run(self, request: Request, seed: int) -> RunResult:
        session = self.plain.session
        inputs, how = session.asked(request)
        torch.manual_seed(seed)
        waveforms = session.reader.own_sound(inputs, how)
        sound = OwnAudio(waveforms, session.codec.sampling_rate)
        frames = sum(len(one) // session.codec.hop for one in waveforms)
        steps = session.reader.steps(frames // len(waveforms))
        return RunResult(None, len(waveforms) * steps, steps - 1, output=sound)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Tiny models of both sorts are counted; equality is asked of the user's own, if there is one.

    Raises ValueError for a recipe that cannot be bound to them.
    """
    small = dict[str, Accelerated]()
    for name in toys.MODELS:
        try:
            small[name] = toys.bound(recipe, name, 0)
        except ValueError:
            if name == list(toys.MODELS)[-1] and not small:
                raise
    return next(iter(small.values())).recipe, _checks(recipe, small, trial)


def _checks(recipe: Recipe, small: Mapping[str, Accelerated], trial: Trial) -> Iterator[Check]:
    ways = {"this model": trial.fast} if trial.fast is not None else small
    for name, fast in ways.items():
        plan, mine = fast.recipe, SpeculativeFrames(fast)
        requests = trial.requests or [toys.asked()]
        yield _greedy(name, fast, requests)
        plain: Runner | None = None
        if not isinstance(fast.session.drafter, Silent):
            other = accelerate(fast.model, "frame-plain", processor=fast.session.processor)
            plain = SpeculativeFrames(other)
        found = checks.seeded_equality(plan, plain, mine, requests, trial)
        yield Check(f"seeded equality, {name}", found.outcome, found.detail)
    few = replace(trial, samples=min(trial.samples, MOST))  # rows are read one by one
    for name in small:
        found = checks.frequency(small[name].recipe, partial(_subject, recipe, name), few, "codes")
        yield Check(f"frequencies, {name}", found.outcome, found.detail, found.distance)


def _subject(recipe: Recipe, name: str, seed: int) -> Subject:
    return toys.speaking(toys.bound(recipe, name, seed), name)


def _greedy(name: str, fast: Accelerated, requests: Sequence[Request]) -> Check:
    """Greedy sound against that of the model's own `generate()`."""
    apart = 0.0
    for request in requests:
        greedy = {**{n: v for n, v in request.items() if n != "temperature"}, "do_sample": False}
        mine: Speech = fast.synthesize(**greedy)
        wanted = OwnFrames(fast).run(greedy, 0).output.waveforms
        for one, other in zip(mine.waveforms, wanted, strict=True):
            same = len(one) == len(other)
            gap = (one - other).abs().amax() if same and len(one) else float(not same)
            apart = max(apart, float(gap))
    detail = f"samples differ from those of generate() by {apart:.1e} at most"
    return Check(f"greedy equality, {name}", outcome(fast.recipe, apart <= APART), detail)
