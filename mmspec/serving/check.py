"""Whether the requests of an accelerated model can run as one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from mmspec.errors import first_line
from mmspec.serving.batch import Row, RowBatch
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.context import make_word_ids
from mmspec.targets.tokens.merge import merge_requests
from mmspec.targets.tokens.turns import count_prompt_slots

NUM_TOKENS = 12  # new tokens of each trial request
PROMPTS = (7, 5)  # tokens of their prompts
DRAFT_SLOTS = 64  # counted per request for its draft


@runtime_checkable
class PlanningSession(Protocol):
    """A session whose requests are prepared apart from their decoding."""

    bound: Any

    def plan(self, arguments: Mapping[str, Any]) -> Any:  # `PlannedRequest`
        ...


def planning_session(fast: Any) -> PlanningSession:
    """The session of an accelerated model. Raises ValueError for one whose requests run alone."""
    session = getattr(fast, "session", None)
    if session is None:
        raise ValueError(
            f"{type(fast).__name__} was not made by accelerate(); give "
            "mmspec.Engine(mmspec.accelerate(model, ...))"
        )
    if not isinstance(session, PlanningSession):
        raise ValueError(
            f"{type(session.model).__name__} decodes each request on its own; an Engine takes text "
            "and vision-language models with generate()"
        )
    return session


@torch.no_grad()
def check_joins_rows(session: PlanningSession) -> None:
    """Let two short requests run as one batch. Raises ValueError if they cannot."""
    bound = session.bound
    name = bound.recipe.name or "custom"
    if bound.gate is not None:
        raise ValueError(
            f"the gate of recipe {name!r} skips the target for whole batches, so requests cannot "
            "run as one; choose a recipe without a gate, such as coupled"
        )
    try:
        failure = _run_trial(session)
    except Exception as error:
        raise ValueError(
            f"the requests of recipe {name!r} on {type(bound.model).__name__} cannot run as one "
            f"batch: {first_line(error)}; call fast.generate() for each"
        ) from error
    if failure is not None:
        raise ValueError(
            f"the drafter of recipe {name!r} fails where rows join and leave ({failure}); call "
            "fast.generate() for each request"
        )


@torch.no_grad()
def find_merge_failure(session: PlanningSession) -> str | None:
    """Why two short prompts cannot be read together by this recipe; None if they can."""
    rows = _make_trial_rows(session)
    requests: list[Any] = [row.call.request for row in rows]
    try:
        batch = RowBatch(rows, merge_requests(requests, requests[0].inputs["input_ids"][0, 0]))
        return _run_and_drop(batch)
    except Exception as error:  # a recipe may fail in any way
        return first_line(error)


def _run_trial(session: PlanningSession) -> str | None:
    """Why the drafter failed, if it did."""
    rows = _make_trial_rows(session)
    batch, other = (RowBatch([row]) for row in rows)
    fallback = batch.step().fallback
    batch.join(other)
    return fallback or _run_and_drop(batch)


def _run_and_drop(batch: RowBatch) -> str | None:
    """Run a round of two rows and one of the last of them; why the drafter failed, if it did."""
    fallback = batch.step().fallback
    batch.drop(batch.rows[0])
    return fallback if batch.rows[0].is_finished else fallback or batch.step().fallback


def _make_trial_rows(session: PlanningSession) -> list[Row]:
    reader = session.bound.backbone
    rows = []
    for count in PROMPTS:
        ids = torch.tensor([make_word_ids(reader, count)], device=reader.device)
        given = {"input_ids": ids, "max_new_tokens": NUM_TOKENS, "do_sample": False, "seed": 0}
        call = session.plan(given).call
        parts = replace(call.parts, stop=Stop(NUM_TOKENS))
        rows.append(Row(replace(call, parts=parts)))
    return rows


def count_slots(planned: Any, max_slots: int | None) -> tuple[int, int]:
    """Check a request; returns the slots of its prompt, and those that it may fill."""
    call = planned.call
    rows = len(call.request.noise.rows)
    if rows != 1:
        raise ValueError(f"the request has {rows} rows; submit each of them alone")
    if planned.extra_outputs:
        raise ValueError(
            f"{', '.join(planned.extra_outputs)} needs a run of its own; drop it, give "
            "logprobs= or on_round= to submit(), or call fast.generate()"
        )
    prompt: int = count_prompt_slots(call.request.inputs, call.request.past)
    slots: int = prompt + call.request.max_new_tokens + DRAFT_SLOTS
    max_slots = max_slots
    if max_slots is not None and slots > max_slots:
        raise ValueError(
            f"the request may fill {slots} slots ({prompt} of its prompt, max_new_tokens="
            f"{call.request.max_new_tokens}, {DRAFT_SLOTS} of its draft), but max_slots="
            f"{max_slots}; give a shorter prompt or fewer tokens"
        )
    return prompt, slots
