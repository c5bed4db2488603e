"""Who answers in words: plain `generate()`, our loop, and the speculation that transformers ships.

Requests are arguments of `generate`, settings and `max_new_tokens` included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.bench.progress import Progress
from mmspec.bench.race import FAILURES, timed
from mmspec.modality import Runner, RunResult, Speculative

LENGTHS = range(3, 9)  # draft lengths that stock assisted generation may choose from
LOOKED_UP = 10  # tokens that stock prompt lookup may copy
PEERS = ("assisted_as_shipped", "assisted", "prompt_lookup")
Request = Mapping[str, Any]


@dataclass(frozen=True)
class Generate:
    """`model.generate()`, with extra arguments for its own ways of speculating."""

    model: Any
    extra: Mapping[str, Any] = field(default_factory=dict)

    def run(self, request: Request, seed: int) -> RunResult:
        if request.get("do_sample"):
            torch.manual_seed(seed)
        with counting(self.model) as calls:
            ids = self.model.generate(**request, **self.extra)
        tokens = new_tokens(self.model, ids, prompt_length(request))
        return RunResult(tokens, sum(map(len, tokens)), max(len(calls) - 1, 0))

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**request, "max_new_tokens": 1}, seed)


@dataclass(frozen=True)
class AssistedGenerate:
    """Stock assisted generation at its best: threshold 0, constant schedule, k drafted tokens.

    The settings are read from the assistant's own generation config, which is put back afterwards.
    """

    model: Any
    drafter: Any
    k: int

    def run(self, request: Request, seed: int) -> RunResult:
        with _drafting(self.drafter, self.k):
            return Generate(self.model, {"assistant_model": self.drafter}).run(request, seed)

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**request, "max_new_tokens": 1}, seed)


class SpeculativeGenerate(Speculative):
    """Our loop with some recipe."""

    def run(self, request: Request, seed: int) -> RunResult:
        out = self.fast.generate(**request, seed=seed)
        tokens = new_tokens(self.fast.model, out.sequences, prompt_length(request))
        stats = out.stats
        return RunResult(
            tokens, sum(map(len, tokens)), stats.target_calls, stats.exact, stats=stats
        )

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**request, "max_new_tokens": 1}, seed)


def stock(
    model: Any, drafter: Any, requests: Sequence[Request], batch: int, seed: int, progress: Progress
) -> tuple[dict[str, Runner], dict[str, str]]:
    """The speculation that transformers ships, and why some of it cannot take part.

    Assisted generation takes part twice: with the settings it is shipped with, and tuned.
    """
    if batch > 1:
        return {}, dict.fromkeys(PEERS, "transformers speculates at batch 1 only")
    found: dict[str, Runner] = {}
    missing: dict[str, str] = {}
    if drafter is None:
        missing |= dict.fromkeys(PEERS[:2], "no draft model was given")
    else:
        shipped = Generate(model, {"assistant_model": drafter})
        try:
            shipped.run(requests[0], seed)
            tuned = best_assisted(model, drafter, requests, seed, progress)
            found |= dict(zip(PEERS, (shipped, tuned), strict=False))
        except FAILURES as error:
            missing |= dict.fromkeys(PEERS[:2], f"{type(error).__name__}: {error}")
    found["prompt_lookup"] = Generate(model, {"prompt_lookup_num_tokens": LOOKED_UP})
    return found, missing


def best_assisted(
    model: Any, drafter: Any, requests: Sequence[Request], seed: int, progress: Progress
) -> AssistedGenerate:
    """Stock assisted generation with the draft length that is quickest on the first requests."""
    candidates = [AssistedGenerate(model, drafter, k) for k in LENGTHS]
    times = []
    for index, one in enumerate(candidates):
        one.run(requests[0], seed)
        spent = [timed(one, request, seed, model.device) for request in requests[:4]]
        times.append(sum(s for s, _ in spent) / max(sum(a.count for _, a in spent), 1))
        progress("choose k of assisted generation", index + 1, len(candidates))
    return candidates[times.index(min(times))]


def prompt_length(request: Request) -> int:
    """Tokens of the prompt that come back before new ones; Whisper's `generate()` gives none."""
    ids = request.get("input_ids")
    return 0 if ids is None else int(ids.shape[1])


def new_tokens(model: Any, sequences: Tensor, length: int) -> list[list[int]]:
    """Tokens behind the prompt, up to and including the first that ends a row."""
    ends = model.generation_config.eos_token_id
    final = set(ends if isinstance(ends, list) else [ends])
    return [_until(row, final) for row in sequences[:, length:].tolist()]


def _until(row: Sequence[int], final: set[Any]) -> list[int]:
    for index, token in enumerate(row):
        if token in final:
            return list(row[: index + 1])
    return list(row)


@contextmanager
def counting(model: Any) -> Iterator[list[None]]:
    """Count forwards of a model; the list grows by one with each."""
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


@contextmanager
def _drafting(drafter: Any, k: int) -> Iterator[None]:
    kept = drafter.generation_config
    changed = deepcopy(kept)
    changed.num_assistant_tokens = k
    changed.num_assistant_tokens_schedule = "constant"
    changed.assistant_confidence_threshold = 0.0
    drafter.generation_config = changed
    try:
        yield
    finally:
        drafter.generation_config = kept
