"""The decoding loop: propose, score, verify, keep, observe.

Streaming, timing and statistics read the rounds that `decode` yields.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

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
from mmspec.targets.attention_kernels import without_plans
from mmspec.trees import row_column

if TYPE_CHECKING:
    from mmspec.distributions.noise import KeyedNoise
    from mmspec.targets.stop import RowStops, Stop

log = logging.getLogger("mmspec")
T = TypeVar("T")


class RequestLike(Protocol):
    """The request of a target; the loop reads its noise only."""

    @property
    def noise(self) -> KeyedNoise: ...


class ContextLike(Protocol):
    """What the loop reads of a context: `Context`, `Trajectory`, `Patches`, `Frames`."""

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
    def num_generated(self, row: int) -> int: ...
    def generated_tokens(self) -> list[list[Any]]: ...
    def empty_draft(self) -> Draft: ...
    def at_round(self, index: int) -> ContextLike: ...


class BrokenLogits(ValueError):
    """The target's scores are NaN or all -inf; `tokens` holds the verified ones of every row."""

    def __init__(self, message: str, round_index: int, tokens: list[list[Any]]) -> None:
        super().__init__(message)
        self.round_index = round_index
        self.tokens = tokens


class Watch(Protocol):
    """Sees a round with its tensors, which stay on the device: it must not read them.

    `probs()` returns the drafter's probabilities (B, N) of its tokens; None = unknown.
    """

    def __call__(
        self, draft: Draft, scores: Scores | None, round_: Round, probs: Callable[[], Tensor | None]
    ) -> None: ...


@dataclass(frozen=True)
class Parts:
    """The parts that decode one request."""

    target: Target
    drafter: Drafter
    verifier: Verifier
    stop: Stop | RowStops
    gate: Gate | None = None
    watch: Watch | None = None  # records traces


def decode(parts: Parts, request: RequestLike) -> Iterator[Round]:
    """Decode one request, yielding one `Round` per iteration until every row has finished.

    Round 0 takes the first token from the prefill; every later round costs one target forward
    (none where the gate skipped it). If the drafter fails, plain decoding finishes the request,
    after one warning.
    """
    running = Running(parts, request)
    while not all(running.context.finished):
        yield running.step()
        running.clock.resume()


class Running:
    """A request in the loop: the prompt is read at construction, every `step` is a round.

    `context` is that of a prompt that was read already.
    """

    def __init__(
        self, parts: Parts, request: RequestLike, context: ContextLike | None = None
    ) -> None:
        self.parts = parts
        self.clock = Clock(request.noise.rows.device)
        self.clock.to("prefill")
        self.context: ContextLike = parts.target.prefill(request) if context is None else context
        self.clock.to("draft")
        self.drafter = GuardedDrafter(parts.drafter)
        self.drafter.begin(self.context)
        self.keys_grow = not self.context.empty_draft().tokens.is_floating_point()
        self.index = 0  # of the next round
        self.scores: Scores | None = None  # of the last round

    @without_plans
    def step(self) -> Round:
        """Run one round; call `clock.resume()` before the next one."""
        parts, clock, guarded = self.parts, self.clock, self.drafter
        target, gate = parts.target, parts.gate
        context = self.context.at_round(self.index)
        scores = context.scores
        clock.to("draft")
        draft = guarded.propose(context) if scores is None else context.empty_draft()
        clock.to("verify")
        verdict = gate.skip(context, draft) if gate is not None and scores is None else None
        called = verdict is None and scores is None
        if called:
            scores = target.score(context, draft)
        if verdict is None:
            assert scores is not None
            verdict = parts.verifier.bind_context(context).verify(draft, scores, context.noise)
        round_ = make_round(self.index, context, draft, scores, verdict, parts.stop)
        calls = scores.calls if called and scores is not None else 0
        round_ = replace(round_, calls=calls, seconds=clock.read())
        clock.to("host")
        if parts.watch is not None:
            parts.watch(draft, scores, round_, lambda: guarded.token_probs(draft))
        self.context = context = target.keep(context, draft, round_)
        if called and scores is not None:
            clock.to("draft")
            guarded.observe(context, draft, scores, round_)
        self.index, self.scores = self.index + 1, scores
        return replace(round_, seconds=clock.read(), fallback=guarded.pop_failure())


def make_round(
    index: int,
    context: ContextLike,
    draft: Draft,
    scores: Scores | None,
    verdict: Verdict,
    stop: Stop | RowStops,
) -> Round:
    """Copy the verdict to the host in one transfer and apply the stop conditions."""
    drafted, path, read, tokens, takes, finished, excess = [], [], [], [], [], [], []
    for row, line in enumerate(_read_back(draft, scores, verdict)):
        if context.finished[row]:
            line, kept, done = _FINISHED_ROW, 0, True
        else:
            if line.broken:
                assert scores is not None
                stop.handle_broken(row, _describe_broken(index, row, context, scores))
                line = _FINISHED_ROW
            kept, done = stop.cut(row, context.num_generated(row), line.tokens, context.prefix)
        drafted.append(line.drafted)
        path.append(line.nodes[:kept])
        read.append(line.read[:kept])
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
        read=None if draft.read_order is None else tuple(read),
        excess=None if verdict.excess is None else tuple(excess),
    )


@dataclass(frozen=True)
class _RowVerdict:
    """One row of a verdict on the host."""

    drafted: int
    nodes: tuple[int, ...]
    tokens: tuple[Any, ...]  # ids, or views (*E) of continuous tokens
    broken: bool
    excess: float = 0.0
    read: tuple[int, ...] = ()  # `Draft.read_order` of the nodes


UNIT = 2.0**-40  # masses are sent as integers, so that one transfer holds everything
_FINISHED_ROW = _RowVerdict(0, (), (), False)


def _read_back(draft: Draft, scores: Scores | None, verdict: Verdict) -> list[_RowVerdict]:
    """The round's only transfer; continuous tokens stay on the device."""
    discrete = draft.tokens.dim() == 2
    first = [verdict.length, _find_invalid_rows(draft, scores, verdict)]
    if discrete and verdict.next is not None:
        first.append(verdict.next)
    columns = [torch.stack(first, 1)]
    rows = row_column(draft.batch, draft.tokens.device)  # -1 reads the last node
    if not draft.is_chain:  # the path of a chain is a count
        columns.append(verdict.path)
    if draft.read_order is not None:
        columns.append(draft.read_order[rows, verdict.path])
    if discrete:
        made = draft.tokens if verdict.replacements is None else verdict.replacements
        columns.append(made if draft.is_chain else made[rows, verdict.path])
    if verdict.excess is not None:
        columns.append((verdict.excess[:, None] / UNIT).long())
    if draft.padded:
        columns.append(draft.mask.sum(-1, keepdim=True))
    read = _parse_discrete if discrete else _parse_continuous
    lines = torch.cat(columns, 1).tolist()
    return [read(row, values, draft, verdict) for row, values in enumerate(lines)]


def _parse_discrete(row: int, values: list[int], draft: Draft, verdict: Verdict) -> _RowVerdict:
    """One row: length, broken, next, path and read order (trees), tokens, `_split_columns`."""
    following = [] if verdict.next is None else [values.pop(2)]
    nodes, drafted, broken, excess = _split_columns(values, draft, verdict)
    longest = verdict.path.shape[1]
    first = 2 if draft.is_chain else 2 + longest
    read: tuple[int, ...] = ()
    if draft.read_order is not None:
        read = tuple(values[first : first + len(nodes)])
        first += longest
    tokens = values[first : first + len(nodes)] + following
    return _RowVerdict(drafted, nodes, tuple(tokens), broken, excess, read)


def _parse_continuous(row: int, values: list[int], draft: Draft, verdict: Verdict) -> _RowVerdict:
    """The same for continuous tokens, which are views of the draft and of the verdict."""
    nodes, drafted, broken, excess = _split_columns(values, draft, verdict)
    made = draft.tokens if verdict.replacements is None else verdict.replacements
    tokens = [made[row, node] for node in nodes]
    if verdict.next is not None:
        tokens.append(verdict.next[row])
    return _RowVerdict(drafted, nodes, tuple(tokens), broken, excess)


def _split_columns(
    values: list[int], draft: Draft, verdict: Verdict
) -> tuple[tuple[int, ...], int, bool, float]:
    """Accepted nodes, size and excess (from the end of `values`, if they vary), and broken."""
    length, broken = values[0], bool(values[1])
    drafted = values.pop() if draft.padded else draft.nodes
    excess = 0.0 if verdict.excess is None else values.pop() * UNIT
    nodes = range(length) if draft.is_chain else values[2 : 2 + length]
    return tuple(nodes), drafted, broken, excess


def _find_invalid_rows(
    draft: Draft, scores: Scores | None, verdict: Verdict
) -> Tensor:  # (B,) bool
    """Rows with invalid scores, padded nodes aside, or target tokens that are NaN or infinite."""
    if scores is None:
        return torch.zeros(draft.batch, dtype=torch.bool, device=draft.tokens.device)
    mask = None
    if draft.padded:
        mask = torch.cat((draft.mask.new_ones(draft.batch, 1), draft.mask), 1)
    broken = scores.distribution.invalid_mask(mask)
    for made in (verdict.replacements, verdict.next):
        if made is not None and made.is_floating_point():
            broken = broken | ~made.isfinite().flatten(1).all(-1)
    return broken


def _describe_broken(index: int, row: int, context: ContextLike, scores: Scores) -> BrokenLogits:
    tokens = context.generated_tokens()
    return BrokenLogits(
        f"the target's {scores.distribution.invalid_reason} in round {index} (row {row}, after "
        f"{len(tokens[row])} new tokens, which are on this exception as .tokens); run the model "
        "in a wider dtype or check its inputs",
        index,
        tokens,
    )


class GuardedDrafter:
    """A drafter and its state; a drafter that raises is disabled after one warning."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter: Drafter | None = drafter
        self.state: Any = None
        self.failure: str | None = None

    def begin(self, context: ContextLike) -> None:
        self.state = self._run_guarded(lambda drafter: drafter.begin(context))

    def propose(self, context: ContextLike) -> Draft:
        draft = self._run_guarded(lambda drafter: _propose_finite(drafter, context, self.state))
        return context.empty_draft() if draft is None else draft

    def observe(self, context: ContextLike, draft: Draft, scores: Scores, round_: Round) -> None:
        self.state = self._run_guarded(
            lambda drafter: drafter.observe(context, self.state, draft, scores, round_)
        )

    def token_probs(self, draft: Draft) -> Tensor | None:
        return self._run_guarded(lambda drafter: drafter.token_probs(self.state, draft))

    def pop_failure(self) -> str | None:
        """Return why the drafter was disabled, once."""
        failure, self.failure = self.failure, None
        return failure

    def _run_guarded(self, step: Callable[[Drafter], T]) -> T | None:
        if self.drafter is None:
            return None
        try:
            return step(self.drafter)
        except Exception as error:  # a failing drafter never fails the request
            self.failure = f"{type(self.drafter).__name__}: {type(error).__name__}: {error}"
            log.warning(
                "the drafter failed; plain decoding finishes this request (%s)", self.failure
            )
            self.drafter = self.state = None
            return None


def _propose_finite(drafter: Drafter, context: ContextLike, state: Any) -> Draft:
    """Raises ValueError for other rows than the context's, and for numbers that are not finite."""
    draft = drafter.propose(context, state)
    if draft.batch != context.batch:
        raise ValueError(
            f"the draft has {draft.batch} rows, the context {context.batch}; draft one per row"
        )
    if draft.tokens.is_floating_point() and not bool(draft.tokens.isfinite().all()):
        raise ValueError(
            "the drafted tokens are NaN or infinite; run the draft model in a wider dtype"
        )
    return draft


class Clock:
    """Attributes the time of a round to labels, without a synchronisation of its own.

    `to("draft")` ends the current label and starts another. On an accelerator, labels are bounded
    by events on the stream, read after the round's one transfer; the rest of the wall time is
    "host". On a CPU the labels are wall time.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        self.began = perf_counter()

    def to(self, label: str) -> None:
        """Start `label`."""
        self.marks.append((label, self._now()))

    def resume(self) -> None:
        """Restart the clock; the time since `read` belongs to the caller."""
        self.began = perf_counter()
        self.marks.clear()

    def read(self) -> dict[str, float]:
        """Seconds per label since `resume`; call it after a synchronisation."""
        wall = perf_counter() - self.began
        end = self._now()
        if self.cuda:
            end.synchronize()
        seconds: dict[str, float] = {}
        stops = [mark for _, mark in self.marks[1:]] + [end]
        for (label, start), stop in zip(self.marks, stops, strict=True):
            passed = start.elapsed_time(stop) / 1e3 if self.cuda else stop - start
            seconds[label] = seconds.get(label, 0.0) + passed
        seconds["host"] = max(wall - sum(v for k, v in seconds.items() if k != "host"), 0.0)
        return seconds

    def _now(self) -> Any:
        if not self.cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
