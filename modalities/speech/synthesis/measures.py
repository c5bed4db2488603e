"""Workloads and certificates of codec language models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench import checks
from mmspec.bench import constant_drafter as constant
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.workload import group_batches, repeat_prompts
from mmspec.drafters.plain import NoDraft
from mmspec.modalities.common import measures
from mmspec.modalities.speech.audio_quality import (
    ReferenceAudio,
    recognition_quality,
    speech_timing,
)
from mmspec.modalities.speech.sentences import held_out_sentences
from mmspec.modalities.speech.speech_loop import Speech
from mmspec.modalities.speech.synthesis import tiny_models
from mmspec.modalities.speech.synthesis.plug import SpeechSession
from mmspec.modalities.speech.utterances import cycle_speakers
from mmspec.modality import Runner, RunResult, Selection, Speculative, Workload
from mmspec.recipe import Recipe

REPLAYED = 4  # requests whose forwards are timed again alone
DEFAULT_TEXTS = ("The weather was fine, so we walked to the harbour.",)
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """The user's prompts; for bundled models by default held-out sentences in all voices."""
    batch, prompts = selection.batch, selection.prompts
    if prompts is None and formatter.source.startswith("zoo:"):
        texts = group_batches(held_out_sentences(selection.count, selection.seed * 10_000), batch)
        speakers = group_batches(cycle_speakers(selection.count), batch)
        pairs = zip(texts, speakers, strict=True)
        requests = [{"voice": voices, **formatter.request(group)} for group, voices in pairs]
    else:
        requests = [
            formatter.request(group) for group in repeat_prompts(prompts or DEFAULT_TEXTS, batch)
        ]
    return of_requests(model, requests, batch, processor=formatter.processor)


def of_requests(model: Any, requests: Sequence[Request], batch: int = 1, **parts: Any) -> Workload:
    """A workload of arguments of `synthesize`, judged by a bundled recogniser."""
    parts["modality"] = "tts"
    plain = accelerate(model, "plain", **parts)
    qualities, missing = recognition_quality(requests)
    return measures.race_workload(
        requests,
        plain,
        SpeculativeSpeech,
        OwnSpeech,
        missing=missing,
        controls=partial(constant.make_controls, model, **parts),
        qualities=qualities,
        extras=speech_timing,
        batch=batch,
        is_greedy=measures.extract_settings(requests).get("temperature") == 0,
        replayed=REPLAYED,
    )


@dataclass(frozen=True)
class SpeculativeSpeech(Speculative):
    """Our loop with some recipe."""

    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, request: Request, seed: int) -> RunResult:
        out: Speech = self.fast.synthesize(**request, **self.options, seed=seed)
        stats = out.stats
        codes = [row[0].tolist() for row in out.codes]
        return RunResult(codes, stats.num_new_tokens, stats.target_calls, stats.exact, out, stats)

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**_drop_duration(request), "max_new_tokens": 1}, seed)


@dataclass(frozen=True)
class OwnSpeech(Runner):
    """The model's own `generate()`, followed by the codec."""

    plain: Accelerated

    def run(self, request: Request, seed: int) -> RunResult:
        session: SpeechSession = self.plain.session
        arguments = session.prepare_arguments((), request)
        torch.manual_seed(seed)
        ids = session.model.generate(**arguments)[:, arguments["input_ids"].shape[1] :]
        rows, layout = ids.tolist(), session.layout
        ended = [row[: row.index(layout.end)] if layout.end in row else row for row in rows]
        codes = [torch.tensor(row, dtype=torch.int64)[None] - layout.first for row in ended]
        waveforms = [session.codec.decode(one) for one in codes]
        spoken = ReferenceAudio(waveforms, session.codec.sampling_rate)
        count = sum(map(len, ended)) + sum(layout.end in row for row in rows)
        return RunResult([row[0].tolist() for row in codes], count, ids.shape[1] - 1, output=spoken)

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**_drop_duration(request), "max_new_tokens": 1}, seed)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Tiny models and the user's own, as `measures.counted` says. Raises ValueError as it does."""
    return measures.certify_counts(
        recipe, trial, tiny_models.bind_recipe, tiny_models.speech_subject, "codes", _equalities
    )


def _equalities(fast: Accelerated, trial: Trial) -> Iterator[Check]:
    plan, session = fast.recipe, cast(SpeechSession, fast.session)
    given = {"codec": session.codec.model, "codes": session.layout, "processor": session.processor}
    other = accelerate(fast.model, "plain", modality="tts", **given)
    is_plain = isinstance(session.bound.drafter, NoDraft)
    mine, plain = SpeculativeSpeech(fast), None if is_plain else SpeculativeSpeech(other)
    requests = trial.requests or [
        {**tiny_models.tiny_request(), "max_new_tokens": tiny_models.MAX_NEW_CODES}
    ]
    greedy = [{**one, "temperature": 0.0} for one in map(_drop_sampling, requests)]
    yield checks.greedy_equality(plan, OwnSpeech(other), mine, greedy, trial, "generate()")
    yield checks.seeded_equality(plan, plain, mine, list(map(_drop_sampling, requests)), trial)


def _drop_sampling(request: Request) -> dict[str, Any]:
    sampling = ("do_sample", "temperature", "top_k", "top_p", "repetition_aware")
    return {name: value for name, value in request.items() if name not in sampling}


def _drop_duration(request: Request) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name != "seconds"}
