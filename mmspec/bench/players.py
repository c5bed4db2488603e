"""Who takes part in a comparison: plain `generate()`, our engine, and the peers in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.api import Accelerated
from mmspec.stats import Stats

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What came out for one request, and how often the target was asked."""

    tokens: list[list[int]]  # new tokens per row, without padding
    calls: int  # forwards of the target, prefill aside
    stats: Stats | None = None

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


class Player(Protocol):
    """Answers requests; everything it needs to be fast is built before."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> Any: ...
    def answer(self, inputs: Inputs, room: int) -> Answer: ...


@dataclass(frozen=True)
class Generate:
    """`model.generate()`, with extra arguments for its own ways of speculating."""

    model: Any
    settings: Mapping[str, Any]
    name: str = "generate"
    extra: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def answer(self, inputs: Inputs, room: int) -> Answer:
        if self.settings.get("do_sample"):
            torch.manual_seed(self.seed)
        length = inputs["input_ids"].shape[1]
        with counting(self.model) as calls:
            ids = self.model.generate(**inputs, **self.settings, **self.extra, max_new_tokens=room)
        return Answer(new_tokens(self.model, ids, length), max(len(calls) - 1, 0))


@dataclass(frozen=True)
class Assisted:
    """Stock assisted generation at its best: threshold 0, constant schedule, k drafted tokens.

    The settings are read from the assistant's own generation config, which is put back afterwards.
    """

    model: Any
    drafter: Any
    k: int
    settings: Mapping[str, Any]
    name: str = "assisted"
    seed: int = 0

    def answer(self, inputs: Inputs, room: int) -> Answer:
        with _drafting(self.drafter, self.k):
            extra = {"assistant_model": self.drafter}
            stock = Generate(self.model, self.settings, self.name, extra, self.seed)
            return stock.answer(inputs, room)


@dataclass(frozen=True)
class Speculative:
    """Our engine with some recipe."""

    fast: Accelerated
    settings: Mapping[str, Any]
    name: str = "method"
    seed: int = 0

    @property
    def model(self) -> Any:
        return self.fast.model

    def answer(self, inputs: Inputs, room: int) -> Answer:
        out = self.fast.generate(**inputs, **self.settings, max_new_tokens=room, seed=self.seed)
        tokens = new_tokens(self.model, out.sequences, inputs["input_ids"].shape[1])
        return Answer(tokens, out.stats.target_calls, out.stats)


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
