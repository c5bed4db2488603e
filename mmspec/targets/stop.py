"""Stop conditions, checked token by token on the host, so that no accepted run overshoots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
)

from mmspec import _hf
from mmspec.distributions.call_state import StateWatch, is_of_user
from mmspec.errors import check_number


def check_seconds(name: str, value: Any) -> None:
    """Check for a number above 0. Raises ValueError."""
    check_number(name, value, example=2.5)
    if value <= 0:
        raise ValueError(f"{name}={value!r} must be above 0; give seconds, such as 2.5")


@dataclass(frozen=True)
class Stop:
    """Keep new tokens up to and including the first at which any condition holds.

    `criteria` are called once per token, with the row's tokens up to it (1, L) on the CPU and
    without scores; with several rows one that keeps state between calls is refused. A row that has
    ended is padded while others continue, even without an EOS token; `generate()` then continues
    such a row. `max_time` (seconds) is measured from `started` and checked once per `cut`; the
    current round is completed. `guard(row, emitted_before, tokens)` is called with the tokens that
    are kept, and raises for those that must not follow.
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    max_time: float | None = None
    criteria: tuple[StoppingCriteria, ...] = ()
    started: float = field(default_factory=time.time)
    guard: Callable[[int, int, Sequence[Any]], None] | None = None

    def __post_init__(self) -> None:
        check_number("max_new_tokens", self.max_new_tokens, whole=True, example=64)
        if self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} leaves nothing to generate; give at least "
                "1, and a max_length above the length of the prompt"
            )
        if self.max_time is not None:
            check_seconds("max_time", self.max_time)
        for criterion in self.criteria:
            if type(criterion).__name__ == "ConfidenceCriteria":  # not a public name
                raise ValueError(
                    "ConfidenceCriteria reads scores and belongs to an assistant; remove it and "
                    "let the drafter decide its length: accelerate(model, length=...)"
                )

    @classmethod
    def from_config(
        cls,
        config: GenerationConfig,
        criteria: Iterable[StoppingCriteria] | None,
        prompt_length: int,
    ) -> Stop:
        """Convert the criteria that `generate()` passes to `custom_generate`, or a user's own.

        `config` is a resolved one (`sampling.resolve`, or the callable's); it gives the conditions
        that the list lacks. `prompt_length` is that of the padded decoder prompt.
        """
        lengths: list[int] = []
        eos: list[frozenset[int]] = []
        clocks: list[MaxTimeCriteria] = []
        others: list[StoppingCriteria] = []
        for criterion in criteria or ():
            if type(criterion) is MaxLengthCriteria:
                lengths.append(criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                eos.append(frozenset(criterion.eos_token_id.reshape(-1).tolist()))
            elif type(criterion) is MaxTimeCriteria:
                clocks.append(criterion)
            else:
                others.append(criterion)
        if not lengths and config.max_length is not None:
            lengths.append(config.max_length)
        if not lengths:
            raise ValueError(
                "nothing limits the length; give max_new_tokens or a MaxLengthCriteria"
            )
        if not clocks and config.max_time is not None:
            clocks.append(MaxTimeCriteria(config.max_time))
        for one in clocks:
            check_seconds("max_time", one.max_time)
        clock = min(clocks, key=lambda c: c.initial_timestamp + c.max_time, default=None)
        return cls(
            max_new_tokens=min(lengths) - prompt_length,
            eos=frozenset().union(*eos) if eos else _hf.eos_ids(config),
            max_time=None if clock is None else clock.max_time,
            criteria=tuple(others),
            started=time.time() if clock is None else clock.initial_timestamp,
        )

    @classmethod
    def resolve(
        cls,
        model: Any,
        config: GenerationConfig,
        prompt_length: int,
        criteria: Sequence[StoppingCriteria] = (),
        tokenizer: Any = None,
    ) -> Stop:
        """The stop conditions of `generate()` for a resolved config and a user's own criteria."""
        made = _hf.make_stopping_criteria(model, config, criteria, tokenizer)
        return cls.from_config(config, made, prompt_length)

    def cut(
        self,
        row: int,
        emitted_before: int,
        tokens: Sequence[Any],
        prefix: Callable[[int], Tensor] | None = None,
    ) -> tuple[int, bool]:
        """Return how many of a row's new tokens are kept, and whether the row is finished.

        `prefix(row)` are the row's tokens (L,) int64 before `tokens`, prompt and left padding
        included; it is called only if there are criteria.
        """
        left = self.max_new_tokens - emitted_before
        kept = min(len(tokens), max(left, 0))
        finished = kept >= left
        if self.eos:
            for index in range(kept):
                if tokens[index] in self.eos:
                    kept, finished = index + 1, True
                    break
        if self.criteria:
            first = self._first_hit(row, tokens[:kept], prefix)
            if first is not None:
                kept, finished = first + 1, True
        if self.guard is not None:
            self.guard(row, emitted_before, tokens[:kept])
        if self.max_time is not None and not finished:
            finished = time.time() - self.started > self.max_time
        return kept, finished

    def handle_broken(self, row: int, error: ValueError) -> None:
        """Called for a row whose logits cannot be used: raises the error."""
        raise error

    def _first_hit(
        self, row: int, tokens: Sequence[int], prefix: Callable[[int], Tensor] | None
    ) -> int | None:
        """The first new token at which a criterion holds."""
        if prefix is None:
            names = ", ".join(type(criterion).__name__ for criterion in self.criteria)
            raise ValueError(f"{names} read the tokens before; give cut() a prefix")
        before = prefix(row).cpu()
        ids = torch.cat((before, torch.tensor(tokens, dtype=before.dtype)))[None]
        first = None
        for index in range(len(tokens)):
            seen = ids[:, : len(before) + index + 1]
            if any(_holds(criterion, seen, row) for criterion in self.criteria):
                first = index
                break
        for watch in self._watches:
            if row or watch.state is None:  # the calls of a single row are those of generate()
                watch.check()
        return first

    @cached_property
    def _watches(self) -> tuple[StateWatch, ...]:
        """Watches of the user's own criteria."""
        return tuple(map(StateWatch, filter(is_of_user, self.criteria)))


class RowStops:
    """The stop conditions of requests that run as one batch, one `Stop` of a single row each.

    A row whose conditions raise, or whose logits are broken, ends; `errors` says why.
    """

    def __init__(self, stops: Sequence[Stop]) -> None:
        self.stops = list(stops)
        self.errors: list[Exception | None] = [None] * len(self.stops)

    @property
    def max_new_tokens(self) -> int:
        """The largest limit of a row."""
        return max(stop.max_new_tokens for stop in self.stops)

    def cut(
        self,
        row: int,
        emitted_before: int,
        tokens: Sequence[Any],
        prefix: Callable[[int], Tensor] | None = None,
    ) -> tuple[int, bool]:
        """As `Stop.cut`."""
        if self.errors[row] is not None:
            return 0, True
        own = None if prefix is None else lambda _: prefix(row)
        try:
            return self.stops[row].cut(0, emitted_before, tokens, own)
        except Exception as error:  # of a user's criterion: the other rows go on
            self.errors[row] = error
            return 0, True

    def handle_broken(self, row: int, error: ValueError) -> None:
        """Note the error, which ends the row."""
        self.errors[row] = error

    def join(self, other: RowStops) -> None:
        """Append the rows of another batch."""
        self.stops += other.stops
        self.errors += other.errors

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.stops[row], self.errors[row] = self.stops[-1], self.errors[-1]
        self.stops.pop()
        self.errors.pop()


def _holds(criterion: StoppingCriteria, ids: Tensor, row: int) -> bool:  # ids (1, L)
    result: Any = criterion(ids, None)
    holds = torch.as_tensor(result)
    if holds.numel() != 1:
        raise ValueError(
            f"{type(criterion).__name__} returned {holds.numel()} values for row {row} alone; a "
            "stopping criterion must return one per row of input_ids"
        )
    return bool(holds)
