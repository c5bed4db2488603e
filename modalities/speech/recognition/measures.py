"""How recognisers are measured: what they hear, by whom, and who answers beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from mmspec.bench.certificate import Check, Trial
from mmspec.bench.workload import grouped
from mmspec.modalities.common import measures
from mmspec.modalities.speech.recognition import toys, word_errors
from mmspec.modalities.speech.recordings import recordings
from mmspec.modalities.speech.sound import Sound
from mmspec.modalities.speech.utterances import RATE_HZ
from mmspec.modality import Runner, RunResult, RunResults, Selection, Workload
from mmspec.recipe import Recipe


@dataclass(frozen=True)
class TimedTexts:
    """What a contestant wrote, and how long it took."""

    texts: list[str]
    seconds: float


@dataclass(frozen=True)
class Listening:
    """A contestant whose answers are read as words and timed."""

    inner: Runner
    words: Any  # tokens -> text

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult:
        start = perf_counter()
        found = self.inner.run(request, seed)
        spent = perf_counter() - start
        return replace(found, output=TimedTexts([self.words(row) for row in found.values], spent))

    def run_first_token(self, request: Mapping[str, Any], seed: int) -> RunResult | None:
        return self.inner.run_first_token(request, seed)


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """The recordings that come with the package, judged by word errors; else the user's sound."""
    batch, references = selection.batch, None
    asked = [*(selection.prompts or [""])][:1] * batch
    if settings.audio is not None:
        sounds = [[formatter.heard] * batch]
    else:
        every = recordings()
        held = [every[at % len(every)] for at in range(max(selection.count, batch))]
        groups = grouped(held, batch)
        sounds = [[Sound(one.waveform(), RATE_HZ) for one in group] for group in groups]
        references = [[one.text for one in group] for group in groups]
    requests = [formatter.request(asked, sounds=group) for group in sounds]
    quality = None if references is None else word_errors.word_error_rate(references)
    work = measures.of_requests(model, requests, quality, batch, selection.drafter)
    seconds = [one.seconds for group in sounds for one in group]
    return _listened(work, formatter.words, partial(_extras, seconds))


def _listened(work: Workload, words: Any, extras: Any) -> Workload:
    """The same with everybody's answers as words."""
    peers = work.peers

    def heard(found: Mapping[str, Runner]) -> dict[str, Runner]:
        return {name: Listening(one, words) for name, one in found.items()}

    def others(*how: Any) -> tuple[Mapping[str, Runner], Mapping[str, str]]:
        assert peers is not None
        found, missing = peers(*how)
        return heard(found), missing

    return replace(
        work,
        plain=Listening(work.plain, words),
        fast=lambda fast: Listening(work.fast(fast), words),
        baselines=heard(work.baselines),
        peers=others,
        extras=extras,
    )


def _extras(
    seconds: Sequence[float], answers: Sequence[RunResult], others: RunResults
) -> dict[str, Any]:
    """The real-time factor, and the share of the target's calls that were saved."""
    own = sum(one.calls for one in others[measures.OWN]) if measures.OWN in others else 0
    calls = sum(one.calls for one in answers)
    saved = {"calls saved": 1 - calls / own} if own else {}
    return {**word_errors.rates(seconds, answers), **saved}


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """As for any model of token ids; the tiny ones are Whispers.

    Raises ValueError for a recipe that needs picture tokens.
    """
    return measures.certify(toys, recipe, trial)
