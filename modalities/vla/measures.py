"""Workloads and certificates of policies: paired episodes against `generate()` and hold-last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench import checks
from mmspec.bench import constant_drafter as constant
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.reporting import Progress
from mmspec.drafters.plain import NoDraft
from mmspec.modalities.common import measures
from mmspec.modalities.vla import tiny_models
from mmspec.modalities.vla.plug import PolicySession
from mmspec.modalities.vla.prediction import ActionsOnly
from mmspec.modalities.vla.quality import ERRORS, extras
from mmspec.modalities.vla.requests import ActionRequest
from mmspec.modalities.vla.rollout import (
    PolicyRequest,
    PolicyResponse,
    Rollout,
    run_episode,
    run_in_parallel,
)
from mmspec.modalities.vla.step_stats import TARGET, ActionStep
from mmspec.modalities.vla.worlds import make_held_out_world, make_world
from mmspec.modality import Runner, RunResult, Selection, Speculative, Workload
from mmspec.recipe import Recipe

HOLD_LAST_RECIPES = ("hold-last", "hold-last-tolerance")  # baselines of every recipe
MAX_STEPS = 8  # of an episode in certificates
MAX_EVALUATED = 4  # episodes that are compared with the target's own actions
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "do_sample")
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Paired episodes: episode i has the environment seed `selection.seed` + i for all runners.

    A batch runs side by side, one robot in each environment, and has one instruction if prompts are
    given.
    """
    count, size = settings.episodes or selection.count, selection.batch
    prompts = [one for one in selection.prompts or () if one.strip()] or [""]
    worlds = [make_held_out_world(settings.world) for _ in range(size if size > 1 else 0)]
    requests = []
    for number, at in enumerate(range(0, count, size)):
        made = formatter.request([prompts[number % len(prompts)]])
        together = {"environment": worlds[: count - at]} if worlds else {}
        requests.append({**made, **together, "episode": selection.seed + at})
    parts = {"processor": formatter.processor, "unnorm_key": settings.unnorm_key}
    return of_requests(model, requests, batch=size, **parts)


def of_requests(model: Any, requests: Sequence[Request], batch: int = 1, **parts: Any) -> Workload:
    """A workload of arguments of `rollout`; action errors are of the first few episodes."""
    parts["modality"] = "vla"
    plain = accelerate(model, "plain", **parts)

    def peers(
        recipes: Mapping[str, Runner], seed: int, progress: Progress
    ) -> tuple[Mapping[str, Runner], Mapping[str, str]]:
        held = {
            name.replace("-", "_"): accelerate(model, name, **parts) for name in HOLD_LAST_RECIPES
        }
        return {name: SpeculativePolicy(one) for name, one in held.items()}, {}

    settings = measures.extract_settings(requests)
    return measures.race_workload(
        requests,
        plain,
        SpeculativePolicy,
        OwnPolicy,
        peers=peers,
        controls=partial(constant.make_controls, model, **parts),
        judged=_select_evaluated(requests),
        batch=batch,
        qualities=ERRORS,
        extras=extras,
        is_greedy=not settings.get("temperature"),
        settings={name: one for name, one in settings.items() if name != "episode"},
    )


def _select_evaluated(requests: Sequence[Request]) -> list[Request]:
    """The first episodes, with `evaluate`."""
    first = requests[0].get("environment")
    chosen = requests[:MAX_EVALUATED]
    if isinstance(first, list):
        chosen = [{**requests[0], "environment": first[:MAX_EVALUATED]}]
    return [{**one, "evaluate": True} for one in chosen]


class SpeculativePolicy(Speculative):
    """Our loop with some recipe: episodes, or a single request of a tiny model."""

    def run(self, request: Request, seed: int) -> RunResult:
        if "environment" in request:
            found = self.fast.rollout(**request, seed=seed)
            return rollout_result(found, self.fast.recipe.exact)
        tiny_models.set_history(self.fast, [0])
        self.fast.predict_action(**request, seed=seed)
        stats: Any = self.fast.last_stats
        tokens = [list(self.fast.steps(0)[-1].tokens)]
        return RunResult(tokens, 1, stats.target_calls, stats.exact, stats=stats)


@dataclass(frozen=True)
class OwnPolicy(Runner):
    """The model's own `generate()`, in the same closed loop."""

    plain: Accelerated

    def run(self, request: Request, seed: int) -> RunResult:
        session: PolicySession = self.plain.session
        if "environment" not in request:
            (tokens,) = self._generate(session.prepare_request((), request))
            return RunResult([tokens], 1, len(tokens) - 1)
        omitted = ("environment", "evaluate", "episode")
        options = {n: v for n, v in request.items() if n not in omitted}
        own = {name: options.pop(name, None) for name in ("instruction", "steps")}

        def act(indices: Sequence[int], requests: Sequence[PolicyRequest]) -> list[PolicyResponse]:
            start = perf_counter()
            columns = tuple(list(one) for one in zip(*requests, strict=True))
            action_request = session.prepare_request(columns, {**options, "robots": list(indices)})
            policy, rows = session.binder.bind(action_request.key), self._generate(action_request)
            actions = [policy.to_units(policy.decode_tokens(row, None)) for row in rows]
            latency_ms = 1e3 * (perf_counter() - start)
            return [
                (action, _plain_step(row, latency_ms))
                for action, row in zip(actions, rows, strict=True)
            ]

        episode, world = request.get("episode", seed), request["environment"]
        torch.manual_seed(seed)
        worlds = list(world) if isinstance(world, list | tuple) else [world]
        made = [make_world(one) if isinstance(one, str) else one for one in worlds]
        episodes = [
            run_episode(one, lambda *_: None, episode + at, **own) for at, one in enumerate(made)
        ]
        return rollout_result(run_in_parallel(episodes, act), True)

    def _generate(self, action_request: ActionRequest) -> list[list[int]]:
        """The tokens of `generate()` per row, restricted to action ids."""
        model = self.plain.model
        policy = self.plain.session.binder.bind(action_request.key)
        warpers = {
            n: getattr(action_request.sampling, n)
            for n in SAMPLING
            if action_request.sampling.do_sample
        }
        with torch.no_grad():
            ids = model.generate(
                **action_request.inputs,
                **{"do_sample": False, **warpers},
                max_new_tokens=policy.num_tokens,
                logits_processor=[_Allowed(ActionsOnly(policy.space.codes))],
                pad_token_id=policy.space.codes.first,
            )
        rows: list[list[int]] = ids[:, -policy.num_tokens :].tolist()
        return rows


def _plain_step(tokens: Sequence[int], latency_ms: float) -> ActionStep:
    """Statistics of a request in which the target predicted every token."""
    count = len(tokens)
    sources = (TARGET,) * count
    return ActionStep(
        0, tuple(tokens), sources, count, count - 1, (), None, 0, 0, latency_ms, False
    )


class _Allowed(LogitsProcessor):
    """`ActionsOnly` as a logits processor of transformers."""

    def __init__(self, allowed: ActionsOnly) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: Any, scores: Any) -> Tensor:  # (B, L), (B, V)
        found: Tensor = self.allowed(scores, input_ids)
        return found


def rollout_result(found: Rollout | Sequence[Rollout], exact: bool) -> RunResult:
    """The result of episodes; calls are per action and robot, since episodes differ in length.

    Latencies of episodes side by side are those of the batch, so the longest episode has all.
    """
    rollouts = [found] if isinstance(found, Rollout) else list(found)
    steps = [step for one in rollouts for step in one.steps]
    actions = sum(len(one.actions) for one in rollouts)
    return RunResult(
        values=[tokens for one in rollouts for tokens in one.tokens],
        count=actions,
        calls=sum(one.target_calls for one in steps) / actions,
        exact=exact,
        output=rollouts,
        stats=rollouts[0].stats,
        seconds=max(one.seconds for one in rollouts),
    )


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Tiny models and the user's own, as `measures.counted` says. Raises ValueError as it does."""
    return measures.certify_counts(
        recipe,
        trial,
        tiny_models.bind_recipe,
        tiny_models.action_subject,
        "components",
        _equalities,
    )


def _equalities(fast: Accelerated, trial: Trial) -> Iterator[Check]:
    plan, session = fast.recipe, cast(PolicySession, fast.session)
    parts = {"processor": session.processor, "modality": "vla"}
    spaces = session.binder.spaces
    parts |= {"actions": spaces.given} if spaces.given else {"unnorm_key": spaces.key}
    other = accelerate(fast.model, "plain", **parts)
    is_plain = isinstance(session.bound.drafter, NoDraft)
    mine, plain = SpeculativePolicy(fast), None if is_plain else SpeculativePolicy(other)
    requests = [_limit_steps(one) for one in trial.requests] or [tiny_models.tiny_request()]
    bare = [{n: v for n, v in one.items() if n not in SAMPLING} for one in requests]
    yield checks.greedy_equality(plan, OwnPolicy(other), mine, bare, trial, "generate()")
    sampled = [{**one, "temperature": 1.0} for one in bare]
    yield checks.seeded_equality(plan, plain, mine, sampled, trial)


def _limit_steps(request: Request) -> dict[str, Any]:
    """Limit an episode to its first steps."""
    steps = min(request.get("steps", MAX_STEPS), MAX_STEPS)
    return {**request, "steps": steps} if "environment" in request else dict(request)
