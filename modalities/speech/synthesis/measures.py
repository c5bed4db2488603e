"""How models that speak are measured: what they say, who listens, and who speaks beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from mmspec.api import Accelerated, accelerate
from mmspec.bench import checks, constant
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.workload import grouped, repeated
from mmspec.drafters.plain import Silent
from mmspec.modalities.common import measures
from mmspec.modalities.speech.judging import OwnAudio, heard, timing
from mmspec.modalities.speech.spoken import Speech
from mmspec.modalities.speech.synthesis import held_out, toys
from mmspec.modalities.speech.synthesis.plug import SpeechSession
from mmspec.modality import Runner, RunResult, Selection, Speculative, Workload
from mmspec.recipe import Recipe

REPLAYED = 4  # requests whose forwards are made again alone
QUESTIONS = ("The weather was fine, so we walked to the harbour.",)
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """For models of the zoo different held-out sentences, by its speakers in turn if no voice was
    asked for; else what the user asks for."""
    batch, prompts = selection.batch, selection.prompts
    if prompts is None and formatter.source.startswith("zoo:"):
        texts = grouped(held_out.texts(selection.count, selection.seed * 10_000), batch)
        speakers = grouped(held_out.voices(selection.count), batch)
        pairs = zip(texts, speakers, strict=True)
        requests = [{"voice": voices, **formatter.request(group)} for group, voices in pairs]
    else:
        requests = [formatter.request(group) for group in repeated(prompts or QUESTIONS, batch)]
    return of_requests(model, requests, batch, processor=formatter.processor)


def of_requests(model: Any, requests: Sequence[Request], batch: int = 1, **parts: Any) -> Workload:
    """Requests are arguments of `synthesize`; words are judged by a recogniser of the zoo."""
    parts["modality"] = "tts"
    plain = accelerate(model, "plain", **parts)
    ears, why = heard(requests)
    return measures.raced(
        requests,
        plain,
        SpeculativeSpeech,
        OwnSpeech,
        missing=why,
        controls=partial(constant.controls, model, **parts),
        qualities=ears,
        extras=timing,
        batch=batch,
        is_greedy=measures.settings_of(requests).get("temperature") == 0,
        replayed=REPLAYED,
    )


@dataclass(frozen=True)
class SpeculativeSpeech(Speculative):
    """Our loop with some recipe."""

    more: Mapping[str, Any] = field(default_factory=dict)

    def run(self, request: Request, seed: int) -> RunResult:
        out: Speech = self.fast.synthesize(**request, **self.more, seed=seed)
        stats = out.stats
        codes = [row[0].tolist() for row in out.codes]
        return RunResult(codes, stats.num_new_tokens, stats.target_calls, stats.exact, out, stats)

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**_endless(request), "max_new_tokens": 1}, seed)


@dataclass(frozen=True)
class OwnSpeech(Runner):
    """The model's own `generate()`, and the codec behind it."""

    plain: Accelerated

    def run(self, request: Request, seed: int) -> RunResult:
        session: SpeechSession = self.plain.session
        asked = session.asked((), request)
        torch.manual_seed(seed)
        ids = session.model.generate(**asked)[:, asked["input_ids"].shape[1] :]
        rows, layout = ids.tolist(), session.layout
        ended = [row[: row.index(layout.end)] if layout.end in row else row for row in rows]
        codes = [torch.tensor(row, dtype=torch.int64)[None] - layout.first for row in ended]
        waveforms = [session.codec.decode(one) for one in codes]
        spoken = OwnAudio(waveforms, session.codec.sampling_rate)
        count = sum(map(len, ended)) + sum(layout.end in row for row in rows)
        return RunResult([row[0].tolist() for row in codes], count, ids.shape[1] - 1, output=spoken)

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**_endless(request), "max_new_tokens": 1}, seed)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Tiny models and the user's own, as `measures.counted` says. Raises ValueError as it does."""
    return measures.counted(recipe, trial, toys.bound, toys.speaking, "codes", _equalities)


def _equalities(fast: Accelerated, trial: Trial) -> Iterator[Check]:
    plan, session = fast.recipe, cast(SpeechSession, fast.session)
    given = {"codec": session.codec.model, "codes": session.layout, "processor": session.processor}
    other = accelerate(fast.model, "plain", modality="tts", **given)
    is_plain = isinstance(session.bound.drafter, Silent)
    mine, plain = SpeculativeSpeech(fast), None if is_plain else SpeculativeSpeech(other)
    requests = trial.requests or [{**toys.asked(), "max_new_tokens": toys.ROOM}]
    greedy = [{**one, "temperature": 0.0} for one in map(_unwarped, requests)]
    yield checks.greedy_equality(plan, OwnSpeech(other), mine, greedy, trial, "generate()")
    yield checks.seeded_equality(plan, plain, mine, list(map(_unwarped, requests)), trial)


def _unwarped(request: Request) -> dict[str, Any]:
    drawn = ("do_sample", "temperature", "top_k", "top_p", "repetition_aware")
    return {name: value for name, value in request.items() if name not in drawn}


def _endless(request: Request) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name != "seconds"}
