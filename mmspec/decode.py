"""The loop: propose, score, verify, keep, observe.

Everything else reads its rounds from outside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from mmspec.clock import Clock
from mmspec.draft import (
    Draft,
    Drafter,
    Gate,
    Round,
    Scores,
    Target,
    Verdict,
    Verifier,
)
from mmspec.targets.stop import Stop

if TYPE_CHECKING:
    from mmspec.distributions.noise import KeyedNoise

log = logging.getLogger("mmspec")
T = TypeVar("T")


class RequestLike(Protocol):
    """What a target is asked; only its noise matters to the loop."""

    @property
    def noise(self) -> KeyedNoise: ...


class ContextLike(Protocol):
    """What the loop asks of a context: `Context`, `Trajectory`, `Patches`, `Frames`."""

    @property
    def batch(self) -> int: ...
    @property
    def noise(self) -> KeyedNoise: ...  # this round's
    @property
    def finished(self) -> tuple[bool, ...]: ...
    @property
    def scores(self) -> Scores | None: ...  # a distribution known without a forward
    @property
    def prefix(self) -> Callable[[int], Tensor] | None: ...  # a row's ids, for stop conditions
    def generated(self, row: int) -> int: ...
    def emitted(self) -> list[list[Any]]: ...
    def nothing(self) -> Draft: ...
    def at_round(self, index: int) -> ContextLike: ...


class BrokenLogits(ValueError):
    """The target gave NaN or all -inf logits, or predicted NaN.

    Nothing verified is lost: `tokens` has it, per row.
    """

    def __init__(self, message: str, round_index: int, tokens: list[list[Any]]) -> None:
        super().__init__(message)
        self.round_index = round_index
        self.tokens = tokens


@dataclass(frozen=True)
class Parts:
    """What is plugged together for one request."""

    target: Target
    drafter: Drafter
    verifier: Verifier
    stop: Stop
    gate: Gate | None = None


def decode(parts: Parts, request: RequestLike) -> Iterator[Round]:
    """Decode one request, yielding a `Round` per turn until every row has finished.

    Round 0 reads the first token off the prefill; every later round costs one target forward (none
    where the gate skipped it). If the drafter fails, plain decoding finishes the request, after one
    warning.
    """
    target, verifier, stop, gate = parts.target, parts.verifier, parts.stop, parts.gate
    clock = Clock(request.noise.rows.device)
    clock.to("prefill")
    context: ContextLike = target.prefill(request)
    clock.to("draft")
    desk = GuardedDrafter(parts.drafter)
    desk.begin(context)
    index = 0
    while not all(context.finished):
        context = context.at_round(index)
        scores = context.scores
        clock.to("draft")
        draft = desk.propose(context) if scores is None else context.nothing()
        clock.to("verify")
        verdict = gate.skip(context, draft) if gate is not None and scores is None else None
        called = verdict is None and scores is None
        if called:
            scores = target.score(context, draft)
        if verdict is None:
            assert scores is not None
            verdict = verifier.within(context).verify(draft, scores, context.noise)
        kept = settle(index, context, draft, scores, verdict, stop)
        calls = scores.calls if called and scores is not None else 0
        kept = replace(kept, calls=calls, seconds=clock.read())
        clock.to("host")
        context = target.keep(context, draft, kept)
        if called and scores is not None:
            clock.to("draft")
            desk.observe(context, draft, scores, kept)
        yield replace(kept, seconds=clock.read(), fallback=desk.pop_failure())
        clock.resume()
        index += 1


def settle(
    index: int,
    context: ContextLike,
    draft: Draft,
    scores: Scores | None,
    verdict: Verdict,
    stop: Stop,
) -> Round:
    """Bring the verdict to the host in one transfer and apply the stop conditions to it."""
    drafted, path, tokens, takes, finished, excess = [], [], [], [], [], []
    for row, line in enumerate(_read_back(draft, scores, verdict)):
        if context.finished[row]:
            line, kept, done = _NOTHING, 0, True
        else:
            if line.broken:
                assert scores is not None
                _refuse(index, row, context, scores)
            kept, done = stop.cut(row, context.generated(row), line.tokens, context.prefix)
        drafted.append(line.drafted)
        path.append(line.nodes[:kept])
        tokens.append(line.tokens[:kept])
        takes.append(kept > len(line.nodes))
        finished.append(done)
        excess.append(line.excess)
    return Round(
        index=index,
        drafted=tuple(drafted),
        accepted=tuple(len(nodes) for nodes in path),
        path=tuple(path),
        takes_next=tuple(takes),
        tokens=tuple(tokens),
        finished=tuple(finished),
        verdict=verdict,
        depth=draft.tree.depth if draft.tree is not None else verdict.path.shape[1],
        excess=None if verdict.excess is None else tuple(excess),
    )


@dataclass(frozen=True)
class _Line:
    """One row of a verdict on the host."""

    drafted: int
    nodes: tuple[int, ...]
    tokens: tuple[Any, ...]  # ids, or views (*E) of continuous tokens
    broken: bool
    excess: float = 0.0


UNIT = 2.0**-40  # masses travel as integers, so that one transfer takes all
_NOTHING = _Line(0, (), (), False)


def _read_back(draft: Draft, scores: Scores | None, verdict: Verdict) -> list[_Line]:
    """The round's only transfer; continuous tokens stay on the device."""
    columns = [verdict.length[:, None]]
    if not draft.is_chain:  # the path of a chain is a count
        columns.append(verdict.path)
    discrete = draft.tokens.dim() == 2
    if discrete:
        made = draft.tokens if verdict.replaced is None else verdict.replaced
        columns.append(made if draft.is_chain else made.gather(1, verdict.path.clamp_min(0)))
        if verdict.next is not None:
            columns.append(verdict.next[:, None])
    if verdict.excess is not None:
        columns.append((verdict.excess[:, None] / UNIT).long())
    if draft.padded:
        columns.append(draft.mask.sum(-1, keepdim=True))
    columns.append(_broken(draft, scores)[:, None])
    read = _discrete if discrete else _continuous
    rows = torch.cat(columns, 1).tolist()
    return [read(row, values, draft, verdict) for row, values in enumerate(rows)]


def _discrete(row: int, values: list[int], draft: Draft, verdict: Verdict) -> _Line:
    """One row of the transfer: length, path (trees), tokens, next, and what `_frame` takes off."""
    nodes, drafted, broken, excess = _frame(values, draft, verdict)
    first = 1 if draft.is_chain else 1 + verdict.path.shape[1]
    tokens = values[first : first + len(nodes)]
    if verdict.next is not None:
        tokens.append(values[-1])
    return _Line(drafted, nodes, tuple(tokens), broken, excess)


def _continuous(row: int, values: list[int], draft: Draft, verdict: Verdict) -> _Line:
    """The same without tokens: those are views of the draft and of the verdict."""
    nodes, drafted, broken, excess = _frame(values, draft, verdict)
    made = draft.tokens if verdict.replaced is None else verdict.replaced
    tokens = [made[row, node] for node in nodes]
    if verdict.next is not None:
        tokens.append(verdict.next[row])
    return _Line(drafted, nodes, tuple(tokens), broken, excess)


def _frame(
    values: list[int], draft: Draft, verdict: Verdict
) -> tuple[tuple[int, ...], int, bool, float]:
    """Kept nodes, and off the end of `values`: excess (measured), size (padded), broken."""
    length, broken = values[0], bool(values.pop())
    drafted = values.pop() if draft.padded else draft.nodes
    excess = 0.0 if verdict.excess is None else values.pop() * UNIT
    nodes = range(length) if draft.is_chain else values[1 : 1 + length]
    return tuple(nodes), drafted, broken, excess


def _broken(draft: Draft, scores: Scores | None) -> Tensor:  # (B,) bool
    """Whether some place of a row has no usable score; padded nodes do not count."""
    if scores is None:
        return torch.zeros(draft.batch, dtype=torch.bool, device=draft.tokens.device)
    if not draft.padded:
        return scores.distribution.broken()
    root = draft.mask.new_ones(draft.batch, 1)
    return scores.distribution.broken(torch.cat((root, draft.mask), 1))


def _refuse(index: int, row: int, context: ContextLike, scores: Scores) -> None:
    tokens = context.emitted()
    raise BrokenLogits(
        f"the target's {scores.distribution.trouble} in round {index} (row {row}, after "
        f"{len(tokens[row])} new tokens, which are on this exception as .tokens); run the model "
        "in a wider dtype or check its inputs",
        index,
        tokens,
    )


class GuardedDrafter:
    """Holds a drafter and its state; a drafter that fails is retired with one warning."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter: Drafter | None = drafter
        self.state: Any = None
        self.failure: str | None = None

    def begin(self, context: ContextLike) -> None:
        self.state = self._guarded(lambda drafter: drafter.begin(context))

    def propose(self, context: ContextLike) -> Draft:
        draft = self._guarded(lambda drafter: drafter.propose(context, self.state))
        return context.nothing() if draft is None else draft

    def observe(self, context: ContextLike, draft: Draft, scores: Scores, kept: Round) -> None:
        self.state = self._guarded(
            lambda drafter: drafter.observe(context, self.state, draft, scores, kept)
        )

    def pop_failure(self) -> str | None:
        """Why the drafter was retired, once."""
        failure, self.failure = self.failure, None
        return failure

    def _guarded(self, step: Callable[[Drafter], T]) -> T | None:
        if self.drafter is None:
            return None
        try:
            return step(self.drafter)
        except Exception as error:  # whatever a drafter does, the request is finished
            self.failure = f"{type(self.drafter).__name__}: {type(error).__name__}: {error}"
            log.warning(
                "the drafter failed; plain decoding finishes this request (%s)", self.failure
            )
            self.drafter = self.state = None
            return None
