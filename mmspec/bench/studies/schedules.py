"""Time of schedules that draft while the target verifies, on a simulated clock.

All of them draft and verify the same tokens in the end, so what decides is, for every position,
whether the draft model's token is the target's. That is read off one real run. The clock then adds
component times: of a drafted token, and of the target, which may be a pipeline of equal stages with
a block in each:

    drafting     x1 x2 x3 x4 x5 x6 ...        until a block is refused
    stage 1      x0 | x1 x2 | x3 x4 | x5 x6
    stage 2           x0    | x1 x2 | x3 x4   x0 leaves it: x1 is known, and so on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmspec.accelerated import Accelerated
from mmspec.bench.reporting import Progress, Report, describe_environment, silent
from mmspec.bench.studies.overlap import OVERLAPPED, ComponentCosts
from mmspec.draft import Round
from mmspec.modality import Workload

RATIOS = (2.0, 4.0, 8.0, 16.0)  # of a target forward to a drafted token
STAGES = (1, 2, 4, 8)
LENGTHS = (2, 3, 4, 6, 8, 12, 16)
MORE = 0.02  # of a target forward, per further token of a block


def read_agreement(rounds: Iterable[Round]) -> list[bool]:
    """Whether each token was also the draft model's, from the rounds of one request with `pearl`.

    There every token has a drafted one: a window is ready only if its first token was the target's.
    The token of the prompt is left out. The last one, which no token follows, counts as refused: no
    schedule drafts it.
    """
    asked = [one for one in rounds if one.calls]
    found: list[bool] = []
    for one, after in zip(asked, [*asked[1:], None], strict=True):
        accepted, emitted = one.accepted[0], len(one.tokens[0])
        found += [True] * min(accepted, emitted)
        if emitted > accepted:
            is_ready = after is not None and after.drafted[0] > 0
            found.append(accepted == one.drafted[0] and is_ready)
    return found


def sequential_time(agrees: Sequence[bool], costs: ComponentCosts, length: int) -> float:
    """Seconds of drafting `length` tokens, then verifying them."""
    place, total = 0, 0.0
    while place < len(agrees):
        drafted = min(length, len(agrees) - place - 1)
        total += drafted * costs.draft + costs.verify(drafted)
        place += _count(agrees, place, drafted) + 1
    return total


def windows_time(agrees: Sequence[bool], costs: ComponentCosts, window: int) -> float:
    """Seconds of drafting a window of tokens while the last one is verified (`pearl`)."""
    place, ready, total = 0, 0, 0.0
    while place < len(agrees):
        longest = len(agrees) - place - 1
        sent = min(ready, longest)
        ahead = window if sent < longest else 0
        total += max(costs.verify(sent), ahead * costs.draft)
        accepted = _count(agrees, place, sent)
        place += accepted + 1
        ready = window - 1 if ahead and accepted == sent and agrees[place - 1] else 0
    return total


def asynchronous_time(
    agrees: Sequence[bool],
    costs: ComponentCosts,
    block: int,
    stages: int = 1,
    is_cancelled: bool = True,
) -> float:
    """Seconds where neither side waits for the other (PipeInfer; with one stage AMUSD).

    The last known token enters the target at once. Further blocks are the tokens that are drafted
    when the first stage is free, at most `block`. When a block leaves the last stage, the target's
    tokens after each of its own are known; if one is not the drafted one, or that is not drafted
    yet, drafting starts again after it. Later blocks leave their stages at once (early
    cancellation), or without `is_cancelled` when they are through.
    """
    now, place = 0.0, 0  # tokens before `place` are known at `now`
    free = [0.0] * stages
    while place < len(agrees):
        run = _Run(agrees, costs, block, now, place, free)
        right = place + _count(agrees, place, len(agrees))
        done = run.enter(now, 1)
        while run.known <= right and run.known < len(agrees) and run.drafted_at <= done:
            done = run.enter(*run.next_block())
        known = min(run.known, right + 1)
        while not is_cancelled and run.known < len(agrees) and run.next_block()[0] < done:
            run.enter(*run.next_block())
        now, place = done, known
        if is_cancelled:
            free = [now] * stages
    return now


@dataclass
class _Run:
    """Blocks in the target since drafting last started, at `start` after the token `place` - 1."""

    agrees: Sequence[bool]
    costs: ComponentCosts
    block: int
    start: float
    place: int
    free: list[float]  # when each stage is; changed in place
    known: int = 0  # tokens before it follow from the blocks so far, if these are right

    @property
    def drafted_at(self) -> float:
        """When the newest of the known tokens is drafted."""
        return self.start + (self.known - self.place) * self.costs.draft

    def enter(self, entry: float, count: int) -> float:
        """Send `count` tokens through all stages; returns when they leave the last one."""
        seconds = self.costs.verify(count - 1) / len(self.free)
        for stage, busy in enumerate(self.free):
            entry = self.free[stage] = max(entry, busy) + seconds
        self.known = self.known + count if self.known else self.place + count
        return entry

    def next_block(self) -> tuple[float, int]:
        """When the next block enters, and its tokens."""
        entry = max(self.free[0], self.drafted_at)
        drafted = self.place + int((entry - self.start) / self.costs.draft + 1e-9)
        left = min(drafted, len(self.agrees) - 1) - (self.known - 1)
        return entry, max(1, min(self.block, left))


def _count(agrees: Sequence[bool], place: int, most: int) -> int:
    """The number of agreements in a row from `place` on, at most `most`."""
    rest = agrees[place : place + most]
    return rest.index(False) if False in rest else len(rest)


@dataclass(frozen=True)
class SchedulePoint:
    """Speed over plain decoding of each schedule, every one at its best length."""

    ratio: float  # of a target forward to a drafted token
    stages: int
    sequential: float
    windows: float  # pearl
    buffer: float  # AMUSD: the stages as one
    pipeline: float  # PipeInfer
    uncancelled: float  # PipeInfer whose refused blocks run to their end


@dataclass(frozen=True)
class Schedules(Report):
    """The report of `mmspec bench schedules`."""

    model: str
    tokens: int
    agreement: float  # share of the tokens that are the draft model's too
    points: list[SchedulePoint]
    environment: dict[str, Any] = field(default_factory=dict)


def schedules(
    accelerated: Callable[..., Accelerated],
    workload: Workload,
    *,
    model: str = "model",
    ratios: Sequence[float] = RATIOS,
    stages: Sequence[int] = STAGES,
    more: float = MORE,
    seed: int = 0,
    progress: Progress = silent,
) -> Schedules:
    """Decode the requests once, and time the schedules for each ratio and number of stages.

    `accelerated(recipe, **parts)` binds recipes to one pair; `more` is what each further token of a
    block takes, of a target forward.
    """
    fast, texts = accelerated(OVERLAPPED), list[list[bool]]()
    for at, request in enumerate(workload.timed):
        rounds: list[Round] = []
        fast.generate(**request, seed=seed, on_round=rounds.append)
        texts.append(read_agreement(rounds))
        progress("decode", at + 1, len(workload.timed))
    count = sum(map(len, texts))
    if not count:
        raise ValueError("all answers ended with the prompt's token; allow more --max-new-tokens")
    points = [
        compare_schedules(texts, ratio, number, more) for ratio in ratios for number in stages
    ]
    share = sum(map(sum, texts)) / count
    return Schedules(model, count, share, points, describe_environment(workload.device))


def compare_schedules(
    texts: Sequence[Sequence[bool]], ratio: float, stages: int, more: float = MORE
) -> SchedulePoint:
    """Time all schedules over the agreement of some texts."""
    costs = ComponentCosts(draft=1.0, step=ratio, more=more * ratio)
    plain = ratio * sum(map(len, texts))

    def best(time: Callable[..., float], lengths: Sequence[int] = LENGTHS, *parts: Any) -> float:
        return plain / min(sum(time(one, costs, size, *parts) for one in texts) for size in lengths)

    blocks = (1, *LENGTHS)
    return SchedulePoint(
        ratio,
        stages,
        sequential=best(sequential_time),
        windows=best(windows_time),
        buffer=best(asynchronous_time, blocks, 1),
        pipeline=best(asynchronous_time, blocks, stages),
        uncancelled=best(asynchronous_time, blocks, stages, False),
    )
