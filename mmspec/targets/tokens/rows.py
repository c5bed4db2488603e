"""Contexts of several requests that run as one batch: rows join and leave between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.sampling import Sampling
from mmspec.targets.memory import Memory, RowMemories
from mmspec.targets.rows import (
    CannotJoin,
    check_joins,
    drop_row,
    join_memories,
    kept_rows,
    to_joinable,
)
from mmspec.targets.tokens.context import Context, Request
from mmspec.trees import NodePrefix


@dataclass(frozen=True)
class RowSampling:
    """The sampling settings of each row; rows of equal settings are computed together.

    All rows are greedy, or none is: a greedy distribution is a point mass for all of them.
    """

    rows: tuple[Sampling, ...]

    @property
    def do_sample(self) -> bool:
        return self.rows[0].do_sample

    @cached_property
    def needs_prefix(self) -> bool:
        return any(one.needs_prefix for one in self.rows)

    @cached_property
    def is_constrained(self) -> bool:
        """As `Sampling.is_constrained`."""
        return any(one.is_constrained for one in self.rows)

    @cached_property
    def of_drafts(self) -> RowSampling:
        """As `Sampling.of_drafts`."""
        return RowSampling(tuple(one.of_drafts for one in self.rows))

    @cached_property
    def position_processors(self) -> tuple[Any, ...]:
        return tuple(change for one in self.rows for change in one.position_processors)

    @cached_property
    def groups(self) -> list[tuple[Sampling, list[int]]]:
        """Each setting with its rows; one with processors stands alone, as these may count rows."""
        groups: list[tuple[Sampling, list[int]]] = []
        for row, one in enumerate(self.rows):
            same = next((g for g in groups if g[0] == one and not one.processors), None)
            if same is None:
                groups.append((one, [row]))
            else:
                same[1].append(row)
        return groups

    def distribution(
        self, logits: Tensor, prefix: NodePrefix | None = None, position: Tensor | None = None
    ) -> Categorical:
        """As `Sampling.distribution`."""
        if len(self.groups) == 1:
            return self.groups[0][0].distribution(logits, prefix, position)
        scores: Tensor | None = None
        for sampling, rows in self.groups:
            own = None if prefix is None else prefix.select(rows)
            place = None if position is None else position[rows]
            part = sampling.distribution(logits[rows], own, place).scores
            scores = part.new_empty(logits.shape) if scores is None else scores
            scores[rows] = part
        assert scores is not None
        return Categorical(scores, hard=not self.do_sample)


def join_contexts(
    context: Context, other: Context, shift: int, join_drafters: Callable[[], None]
) -> Context:
    """One context of the rows of both, whose memories are joined; the old ones are not used again.

    Round 0 of `other` is round `shift` of the batch. `join_drafters` joins the states of the
    drafters; it and this function raise CannotJoin before anything is changed.
    """
    _check(context)
    _check(other)
    if context.sampling.do_sample != other.sampling.do_sample:
        raise CannotJoin("greedy and sampled requests run as separate batches")
    context, other = drop_padding(context), drop_padding(other)
    check_joins(context.memory, other.memory)
    join_drafters()
    memory = join_memories(context.memory, other.memory)
    return replace(
        context,
        request=_join_requests(context, other, shift),
        history=(*context.history, *other.history),
        prompt=(*context.prompt, *other.prompt),
        padding=(*context.padding, *other.padding),
        num_unknown=(*_unknown(context), *_unknown(other)),
        memory=memory,
        noise=context.noise.join(other.noise, shift),
        finished=(*context.finished, *other.finished),
        shared={},
    )


def drop_padding(context: Context) -> Context:
    """The context in the form in which others can join it, without the padding of its prompts.

    Raises CannotJoin; see `to_joinable`.
    """
    before, own = context.memory.padding, context.padding
    memory, request = to_joinable(context.memory), context.request
    if request.is_merged:
        rows = zip(request.inputs["input_ids"], own, strict=True)
        inputs = {"input_ids": tuple(ids[pad:] for ids, pad in rows)}
        request = replace(request, inputs=inputs, is_merged=False)
    dropped = zip(own, before, memory.padding, strict=True)
    padding = tuple(pad - had + has for pad, had, has in dropped)
    return replace(context, request=request, memory=memory, padding=padding)


def drop_context_row(context: Context, row: int) -> Context:
    """The context without a row; the last one takes its place."""
    drop_row(context.memory, row)
    kept = kept_rows(context.batch, row)
    index = torch.tensor(kept, device=context.device)
    request, ids = context.request, context.request.inputs["input_ids"]
    assert request.row_limits is not None
    limits = _pick(request.row_limits, kept)
    sampling: Any = RowSampling(_pick(_row_sampling(request).rows, kept))
    return replace(
        context,
        request=replace(
            request,
            inputs={"input_ids": _pick(ids, kept)},
            sampling=sampling,
            noise=request.noise.select(index),
            max_new_tokens=max(limits),
            row_limits=limits,
        ),
        history=_pick(context.history, kept),
        prompt=_pick(context.prompt, kept),
        padding=_pick(context.padding, kept),
        num_unknown=_pick(_unknown(context), kept),
        noise=context.noise.select(index),
        finished=_pick(context.finished, kept),
    )


def _check(context: Context) -> None:
    """Raises CannotJoin for a context whose rows depend on the request as a whole."""
    if not isinstance(context.memory, Memory | RowMemories):
        raise CannotJoin("the prompt is not read yet")
    if context.scores is not None:
        raise CannotJoin("the first token is not sampled yet")
    if context.memory.batch != context.batch:
        raise CannotJoin("guidance doubles the rows of this model")


def _join_requests(context: Context, other: Context, shift: int) -> Request:
    ours, theirs = _batch_request(context), _batch_request(other)
    limits = (*(ours.row_limits or ()), *(theirs.row_limits or ()))
    sampling: Any = RowSampling((*_row_sampling(ours).rows, *_row_sampling(theirs).rows))
    return Request(
        inputs={"input_ids": (*ours.inputs["input_ids"], *theirs.inputs["input_ids"])},
        sampling=sampling,
        noise=ours.noise.join(theirs.noise, shift),
        max_new_tokens=max(limits),
        row_limits=limits,
    )


def _batch_request(context: Context) -> Request:
    """The request with a prompt, settings and a limit per row."""
    request = context.request
    if request.row_limits is not None:
        return request
    ids = request.inputs.get("input_ids")
    given = [torch.zeros(0, dtype=torch.int64)] * context.batch if ids is None else list(ids)
    sampling: Any = RowSampling((request.sampling,) * context.batch)
    return Request(
        inputs={"input_ids": tuple(given)},
        sampling=sampling,
        noise=request.noise,
        max_new_tokens=request.max_new_tokens,
        row_limits=(request.max_new_tokens,) * context.batch,
    )


def _row_sampling(request: Request) -> RowSampling:
    found: Any = request.sampling
    assert isinstance(found, RowSampling)
    return found


def _unknown(context: Context) -> tuple[int, ...]:
    return context.num_unknown or (0,) * context.batch


def _pick(values: Sequence[Any], rows: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[row] for row in rows)
