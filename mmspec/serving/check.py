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

NUM_TOKENS = 12  # new tokens of each trial request
PROMPTS = (7, 5)  # tokens of their prompts


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


def _run_trial(session: PlanningSession) -> str | None:
    """Why the drafter failed, if it did."""
    reader = session.bound.backbone
    rows = []
    for count in PROMPTS:
        ids = torch.tensor([make_word_ids(reader, count)], device=reader.device)
        given = {"input_ids": ids, "max_new_tokens": NUM_TOKENS, "do_sample": False, "seed": 0}
        call = session.plan(given).call
        parts = replace(call.parts, stop=Stop(NUM_TOKENS))
        rows.append(Row(replace(call, parts=parts)))
    batch, other = RowBatch(rows[0]), RowBatch(rows[1])
    fallbacks = [batch.step().fallback]
    batch.join(other)
    fallbacks += [batch.step().fallback, batch.step().fallback]
    if not rows[0].is_finished:
        batch.drop(rows[0])
        fallbacks.append(batch.step().fallback)
    return next((one for one in fallbacks if one is not None), None)
