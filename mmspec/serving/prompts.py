"""Prompts of several waiting requests: when they are read, whether together, and in what pieces.

Requests of one kind and of like length are read in one forward, padded on the left, if that gives
the scores of each alone. Model classes and their media differ, so the first requests of a kind are
read both ways; if the scores differ by more than rounding, those of this kind are read one by one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, cast

import torch

from mmspec.drafters.lengths.goodput import ForwardTimings
from mmspec.errors import first_line
from mmspec.modality import Call
from mmspec.serving.batch import Row, RowBatch
from mmspec.serving.check import PlanningSession, find_merge_failure
from mmspec.serving.ticket import Ticket
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.rounding import rounding_margin, score_difference
from mmspec.targets.rows import to_joinable
from mmspec.targets.tokens.chunks import ChunkedPrompt
from mmspec.targets.tokens.context import Request, make_word_ids
from mmspec.targets.tokens.merge import find_merge_obstacle, merge_key, merge_requests

log = logging.getLogger("mmspec")
LIKE = 0.5  # least share of the longest prompt of a group that another one fills


class PrefillReader:
    """Reads the prompts of requests that an engine has room for."""

    def __init__(self, session: PlanningSession, max_slots: int) -> None:
        self.groups, self.timer, self.max_slots = PromptGroups(session), PromptTimer(), max_slots
        self.partial: tuple[Ticket, ChunkedPrompt] | None = None  # a long prompt, read in part

    def read(
        self, ready: int, running: int, take_next: Callable[[], Ticket | None]
    ) -> Iterator[tuple[list[Ticket], RowBatch | Exception]]:
        """Read prompts, if it is time to; yields requests with their batch, or with their error.

        `ready` requests wait for which there is room. A prompt of more than `max_slots` is read in
        chunks, one per call.
        """
        if self.partial is not None:
            yield from self._read_chunk(*self.partial)
            return
        if not self.timer.is_due(ready, running):
            return
        for group in self.groups.split(list(iter(take_next, None))):
            long = None
            if group[0].prompt_slots > self.max_slots:
                long = self.groups.split_prompt(group[0], self.max_slots)
            yield from self._read_group(group) if long is None else self._read_chunk(group[0], long)

    def drop_partial(self, now: float) -> Ticket | None:
        """Drop a prompt that is read in part, if its request has ended, and return that."""
        if self.partial is None or not self.partial[0].has_ended(now):
            return None
        (ticket, _), self.partial = self.partial, None
        return ticket

    def _read_group(self, tickets: list[Ticket]) -> Iterator[tuple[list[Ticket], Any]]:
        start, rows = monotonic(), [ticket.row for ticket in tickets]
        for ticket in tickets:
            ticket.started_at = start
        try:
            batch = self.groups.read(rows, tickets[0].kind) if len(rows) > 1 else RowBatch(rows)
        except Exception as error:  # of the model, or of the request
            yield tickets, error
            return
        if batch is None:
            for ticket in tickets:
                yield from self._read_group([ticket])
            return
        self.timer.add(len(rows), monotonic() - start)
        yield tickets, batch

    def _read_chunk(
        self, ticket: Ticket, prompt: ChunkedPrompt
    ) -> Iterator[tuple[list[Ticket], Any]]:
        self.partial, ticket.started_at = (ticket, prompt), ticket.started_at or monotonic()
        try:
            context = prompt.step()
            if context is None:
                return
            found: Any = RowBatch([ticket.row], None, context)
        except Exception as error:  # of the model, or of the request
            found = error
        self.partial = None
        yield [ticket], found


class PromptGroups:
    """Reads the prompts of rows together.

    `reasons` counts the requests that were read alone, by reason.
    """

    def __init__(self, session: PlanningSession) -> None:
        self.bound = session.bound
        self.obstacle = self._find_obstacle() or find_merge_failure(session)
        self.reasons = Counter[str]()
        self.agreed: dict[Any, bool] = {}  # by kind, and whether there was padding

    def find_kind(self, call: Call) -> Any:
        """What a request has in common with those it may be read with; None: it is read alone."""
        request: Any = call.request
        reason = self.obstacle or find_merge_obstacle(request, self.bound.model)
        if reason is not None:
            self.reasons[reason] += 1
            return None
        return merge_key(request)

    @staticmethod
    def split(tickets: Sequence[Ticket]) -> list[list[Ticket]]:
        """Groups of one kind and of like length, which may be read together."""
        groups: list[list[Ticket]] = []
        for ticket in sorted(tickets, key=lambda one: -one.prompt_slots):
            for group in groups if ticket.kind is not None else ():
                is_like = ticket.prompt_slots >= LIKE * group[0].prompt_slots
                if group[0].kind == ticket.kind and is_like:
                    group.append(ticket)
                    break
            else:
                groups.append([ticket])
        return groups

    def split_prompt(self, ticket: Ticket, size: int) -> ChunkedPrompt | None:
        """A prompt of more than `size` slots in chunks; None where it has to be read as a whole."""
        target, request = self.bound.target, cast(Request, ticket.row.call.request)
        reason = ChunkedPrompt.find_obstacle(target, request, size)
        if reason is None:
            return ChunkedPrompt(target, request, size)
        self.reasons[f"a long prompt is read as a whole: {reason}"] += 1
        return None

    def read(self, rows: Sequence[Row], kind: Any) -> RowBatch | None:
        """Read the prompts of rows of one kind; None where they have to be read one by one."""
        requests: list[Any] = [row.call.request for row in rows]
        lengths = {one.inputs["input_ids"].shape[1] for one in requests}
        key = (kind, len(lengths) > 1)
        if self.bound.backbone.stepwise or not self.agreed.get(key, True):
            return None
        reader = self.bound.backbone
        try:
            merged = merge_requests(requests, make_word_ids(reader, 1)[0])
            if key not in self.agreed:
                self.agreed[key] = self._compare(requests, merged)
            if self.agreed[key]:
                return RowBatch(rows, merged)
        except Exception as error:  # of one of them: alone, it is known whose it is
            if any(row.tokens for row in rows):
                raise
            if not isinstance(error, torch.OutOfMemoryError):
                self.reasons[f"read together they fail ({first_line(error)})"] += len(rows)
            return None
        self.reasons["read together they have other scores"] += len(rows)
        log.info("prompts of this kind are read one by one: %s", kind)
        return None

    def _find_obstacle(self) -> str | None:
        """Why no requests of this model are read together."""
        reader = self.bound.backbone
        if not isinstance(reader, Backbone) or not reader.can_branch or reader.stepwise:
            return f"{type(reader.model).__name__} is read row by row"
        if self.bound.target.defers_prefill:
            return "its first token is drafted before the prompt is read"
        return None

    def _compare(self, requests: Sequence[Request], merged: Request) -> bool:
        """Whether the scores after each prompt are those of the prompt alone.

        Raises CannotJoin where the rows cannot be separated.
        """
        reader = self.bound.backbone
        memory, together, _ = reader.prefill(merged.inputs, 1)
        to_joinable(memory)
        alone = [reader.prefill(one.inputs, 1)[1] for one in requests]
        margin = rounding_margin(reader.model.dtype)
        pairs = zip(together, alone, strict=True)
        return all(float(score_difference(ours[None], own)) <= margin for ours, own in pairs)


class PromptTimer:
    """Decides when waiting prompts are read: together they are cheaper, but the first ones wait.

    Prompts are read as soon as the time that they have waited, summed over them, reaches the time
    that the running rows lose to one more forward (the rule of Dooly, Goldman and Scott 1998 for
    acknowledgements: at most twice the latency of the best schedule, whatever comes). That time
    is measured: what two prompts cost less together than one after the other.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self.seconds = ForwardTimings()  # by number of prompts
        self.waited_s = 0.0  # summed over those that wait
        self.checked_at = clock()

    @property
    def saved_s(self) -> float:
        """What two prompts cost less together."""
        if not self.seconds:
            return 0.0
        return max(2 * self.seconds.cost(1) - self.seconds.cost(2), 0.0)

    def is_due(self, waiting: int, running: int) -> bool:
        """Whether to read now, where so many requests wait that there is room for."""
        now = self.clock()
        self.waited_s += waiting * (now - self.checked_at) if waiting else -self.waited_s
        self.checked_at = now
        return waiting > 0 and self.waited_s >= self.saved_s * running

    def add(self, prompts: int, seconds: float) -> None:
        """Note that so many prompts were read together in this time."""
        self.seconds.add(prompts, seconds)
        self.waited_s = 0.0
