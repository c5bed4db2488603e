"""Workloads and certificates of speech recognition models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from mmspec.bench.certificate import Check, Trial
from mmspec.bench.workload import group_batches
from mmspec.modalities.common import measures
from mmspec.modalities.common.sound import Sound
from mmspec.modalities.speech.recognition import tiny_models, word_errors
from mmspec.modalities.speech.recordings import recordings
from mmspec.modalities.speech.utterances import RATE_HZ
from mmspec.modality import Runner, RunResult, RunResults, Selection, Workload
from mmspec.recipe import Recipe


@dataclass(frozen=True)
class TimedTexts:
    """Transcripts, and the seconds that they took."""

    texts: list[str]
    seconds: float


@dataclass(frozen=True)
class TranscribingRunner:
    """A runner whose tokens are decoded to text and timed."""

    inner: Runner
    decode: Any  # tokens -> text

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult:
        start = perf_counter()
        result = self.inner.run(request, seed)
        seconds = perf_counter() - start
        texts = [self.decode(row) for row in result.values]
        return replace(result, output=TimedTexts(texts, seconds))

    def run_first_token(self, request: Mapping[str, Any], seed: int) -> RunResult | None:
        return self.inner.run_first_token(request, seed)


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """The user's recording, or the bundled ones, judged by word error rate."""
    batch, references = selection.batch, None
    prompts = [*(selection.prompts or [""])][:1] * batch
    if settings.audio is not None:
        sounds = [[formatter.audio] * batch]
    else:
        every = recordings()
        chosen = [every[at % len(every)] for at in range(max(selection.count, batch))]
        groups = group_batches(chosen, batch)
        sounds = [[Sound(one.waveform(), RATE_HZ) for one in group] for group in groups]
        references = [[one.text for one in group] for group in groups]
    requests = [formatter.request(prompts, sounds=group) for group in sounds]
    quality = None if references is None else word_errors.word_error_rate(references)
    work = measures.request_workload(model, requests, quality, batch, selection.drafter)
    seconds = [one.seconds for group in sounds for one in group]
    return _add_transcripts(work, formatter.decode, partial(_real_time_figures, seconds))


def _add_transcripts(work: Workload, decode: Any, extras: Any) -> Workload:
    """The workload with the output of all runners decoded to text."""
    make_peers = work.peers

    def wrap(runners: Mapping[str, Runner]) -> dict[str, Runner]:
        return {name: TranscribingRunner(one, decode) for name, one in runners.items()}

    def peers(*args: Any) -> tuple[Mapping[str, Runner], Mapping[str, str]]:
        assert make_peers is not None
        runners, missing = make_peers(*args)
        return wrap(runners), missing

    return replace(
        work,
        plain=TranscribingRunner(work.plain, decode),
        fast=lambda fast: TranscribingRunner(work.fast(fast), decode),
        baselines=wrap(work.baselines),
        peers=peers,
        extras=extras,
    )


def _real_time_figures(
    seconds: Sequence[float], answers: Sequence[RunResult], others: RunResults
) -> dict[str, Any]:
    """The real-time factor, and the share of target calls saved against plain `generate()`."""
    own = (
        sum(one.calls for one in others[measures.OWN_GENERATE])
        if measures.OWN_GENERATE in others
        else 0
    )
    calls = sum(one.calls for one in answers)
    saved = {"calls saved": 1 - calls / own} if own else {}
    return {**word_errors.real_time_factor(seconds, answers), **saved}


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Checks of `measures.certify` on tiny Whispers. Raises ValueError as it does."""
    return measures.certify(tiny_models, recipe, trial)
