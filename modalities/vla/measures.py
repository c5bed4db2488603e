"""How policies are measured: on paired episodes, beside `generate()` and the last action held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from mmspec.api import Accelerated, accelerate
from mmspec.bench import checks, constant
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.progress import Progress
from mmspec.drafters.plain import Silent
from mmspec.modalities.common import measures
from mmspec.modalities.vla import toys
from mmspec.modalities.vla.answering import ActionsOnly
from mmspec.modalities.vla.asked import ActionQuestion
from mmspec.modalities.vla.judging import ERRORS, extras
from mmspec.modalities.vla.plug import PolicySession
from mmspec.modalities.vla.rollout import Rollout, roll_out
from mmspec.modalities.vla.step_stats import TARGET, ActionStep
from mmspec.modality import Runner, RunResult, Selection, Speculative, Workload
from mmspec.recipe import Recipe

HELD = ("hold-last", "hold-last-tolerance")  # peers that every recipe of actions must beat
CERTIFIED = 8  # steps of an episode that certificates look at
EVALUATED = 4  # episodes in which the target is asked by itself at every step, for the errors
DRAWN = ("temperature", "top_k", "top_p", "min_p", "do_sample")
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Episode i has the world's seed `selection.seed` + i, for everybody.

    Raises ValueError for a batch: robots in one world act one at a time.
    """
    if selection.batch > 1:
        raise ValueError("episodes are measured one robot at a time; drop --batch")
    count = settings.episodes or selection.count
    prompts = [one for one in selection.prompts or () if one.strip()] or [""]
    requests = [
        {**formatter.request([prompts[at % len(prompts)]]), "episode": selection.seed + at}
        for at in range(count)
    ]
    parts = {"processor": formatter.processor, "unnorm_key": settings.unnorm_key}
    return of_requests(model, requests, **parts)


def of_requests(model: Any, requests: Sequence[Request], **parts: Any) -> Workload:
    """Requests are arguments of `rollout`; errors are judged on the first few of them."""
    parts["modality"] = "vla"
    plain = accelerate(model, "plain", **parts)

    def peers(
        recipes: Mapping[str, Runner], seed: int, progress: Progress
    ) -> tuple[Mapping[str, Runner], Mapping[str, str]]:
        held = {name.replace("-", "_"): accelerate(model, name, **parts) for name in HELD}
        return {name: SpeculativePolicy(one) for name, one in held.items()}, {}

    said = measures.settings_of(requests)
    return measures.raced(
        requests,
        plain,
        SpeculativePolicy,
        OwnPolicy,
        peers=peers,
        controls=partial(constant.controls, model, **parts),
        judged=[{**one, "evaluate": True} for one in requests[:EVALUATED]],
        qualities=ERRORS,
        extras=extras,
        is_greedy=not said.get("temperature"),
        settings={name: one for name, one in said.items() if name != "episode"},
    )


class SpeculativePolicy(Speculative):
    """Our loop with some recipe: an episode, or a single question of a tiny model."""

    def run(self, request: Request, seed: int) -> RunResult:
        if "environment" in request:
            found: Rollout = self.fast.rollout(**request, seed=seed)
            return of_rollout(found, self.fast.recipe.exact)
        toys.remember(self.fast, [0])
        self.fast.predict_action(**request, seed=seed)
        stats: Any = self.fast.last_stats
        said = [list(self.fast.steps(0)[-1].tokens)]
        return RunResult(said, 1, stats.target_calls, stats.exact, stats=stats)


@dataclass(frozen=True)
class OwnPolicy(Runner):
    """The model's own `generate()`, in the same loop with the world."""

    plain: Accelerated

    def run(self, request: Request, seed: int) -> RunResult:
        session: PolicySession = self.plain.session
        if "environment" not in request:
            said = self._said(session.question((), request))
            return RunResult([said], 1, len(said) - 1)
        how = {n: v for n, v in request.items() if n not in ("environment", "evaluate", "episode")}
        told = {name: how.pop(name, None) for name in ("instruction", "steps")}

        def act(picture: Any, words: str) -> tuple[np.ndarray, ActionStep]:
            begun = perf_counter()
            question = session.question((picture, words), how)
            said, policy = self._said(question), session.binder.bind(question.key)
            action, count = policy.units(policy.filled(said, None)), len(said)
            spent = 1e3 * (perf_counter() - begun)
            step = ActionStep(
                0, tuple(said), (TARGET,) * count, count, count - 1, (), None, 0, 0, spent, False
            )
            return action, step

        episode = request.get("episode", seed)
        torch.manual_seed(seed)
        return of_rollout(
            roll_out(request["environment"], act, lambda *_: None, episode, **told), True
        )

    def _said(self, question: ActionQuestion) -> list[int]:
        """The tokens of `generate()`, which may say nothing but actions."""
        model = self.plain.model
        policy = self.plain.session.binder.bind(question.key)
        warps = {n: getattr(question.sampling, n) for n in DRAWN if question.sampling.do_sample}
        with torch.no_grad():
            ids = model.generate(
                **question.inputs,
                **{"do_sample": False, **warps},
                max_new_tokens=policy.places,
                logits_processor=[_Allowed(ActionsOnly(policy.space.codes))],
                pad_token_id=policy.space.codes.first,
            )
        return [int(one) for one in ids[0, -policy.places :]]


class _Allowed(LogitsProcessor):
    """`ActionsOnly` as transformers takes it."""

    def __init__(self, allowed: ActionsOnly) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: Any, scores: Any) -> Tensor:  # (B, L), (B, V)
        found: Tensor = self.allowed(scores, input_ids)
        return found


def of_rollout(found: Rollout, exact: bool) -> RunResult:
    """Calls are per action, since a worse policy may need more of those; so is the count."""
    steps, actions = found.steps, len(found.actions)
    return RunResult(
        values=found.tokens,
        count=actions,
        calls=sum(one.target_calls for one in steps) / actions,
        exact=exact,
        output=found,
        stats=found.stats,
        seconds=found.seconds,
    )


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Tiny models and the user's own, as `measures.counted` says. Raises ValueError as it does."""
    return measures.counted(recipe, trial, toys.bound, toys.acting, "components", _equalities)


def _equalities(fast: Accelerated, trial: Trial) -> Iterator[Check]:
    plan, session = fast.recipe, cast(PolicySession, fast.session)
    parts = {"processor": session.processor, "modality": "vla"}
    spaces = session.binder.spaces
    parts |= {"actions": spaces.given} if spaces.given else {"unnorm_key": spaces.key}
    other = accelerate(fast.model, "plain", **parts)
    is_plain = isinstance(session.bound.drafter, Silent)
    mine, plain = SpeculativePolicy(fast), None if is_plain else SpeculativePolicy(other)
    requests = [_shortened(one) for one in trial.requests] or [toys.asked()]
    bare = [{n: v for n, v in one.items() if n not in DRAWN} for one in requests]
    yield checks.greedy_equality(plan, OwnPolicy(other), mine, bare, trial, "generate()")
    drawn = [{**one, "temperature": 1.0} for one in bare]
    yield checks.seeded_equality(plan, plain, mine, drawn, trial)


def _shortened(request: Request) -> dict[str, Any]:
    """An episode's first steps: where all are the same, so is the next question."""
    steps = min(request.get("steps", CERTIFIED), CERTIFIED)
    return {**request, "steps": steps} if "environment" in request else dict(request)
