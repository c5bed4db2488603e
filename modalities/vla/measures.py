"""Workloads and certificates of policies: paired episodes against `generate()` and hold-last."""

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
from mmspec.modalities.vla.rollout import Rollout, run_single_episode
from mmspec.modalities.vla.step_stats import TARGET, ActionStep
from mmspec.modality import Runner, RunResult, Selection, Speculative, Workload
from mmspec.recipe import Recipe

HOLD_LAST_RECIPES = ("hold-last", "hold-last-tolerance")  # baselines of every recipe
MAX_STEPS = 8  # of an episode in certificates
MAX_EVALUATED = 4  # episodes that are compared with the target's own actions
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "do_sample")
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Paired episodes: episode i has the environment seed `selection.seed` + i for all runners.

    Raises ValueError for a batch: one environment has one robot.
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
        judged=[{**one, "evaluate": True} for one in requests[:MAX_EVALUATED]],
        qualities=ERRORS,
        extras=extras,
        is_greedy=not settings.get("temperature"),
        settings={name: one for name, one in settings.items() if name != "episode"},
    )


class SpeculativePolicy(Speculative):
    """Our loop with some recipe: an episode, or a single request of a tiny model."""

    def run(self, request: Request, seed: int) -> RunResult:
        if "environment" in request:
            found: Rollout = self.fast.rollout(**request, seed=seed)
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
            tokens = self._generate(session.prepare_request((), request))
            return RunResult([tokens], 1, len(tokens) - 1)
        omitted = ("environment", "evaluate", "episode")
        options = {n: v for n, v in request.items() if n not in omitted}
        own = {name: options.pop(name, None) for name in ("instruction", "steps")}

        def act(image: Any, instruction: str) -> tuple[np.ndarray, ActionStep]:
            start = perf_counter()
            action_request = session.prepare_request((image, instruction), options)
            tokens = self._generate(action_request)
            policy, count = session.binder.bind(action_request.key), len(tokens)
            action = policy.to_units(policy.decode_tokens(tokens, None))
            latency_ms = 1e3 * (perf_counter() - start)
            sources = (TARGET,) * count
            step = ActionStep(
                0, tuple(tokens), sources, count, count - 1, (), None, 0, 0, latency_ms, False
            )
            return action, step

        episode = request.get("episode", seed)
        torch.manual_seed(seed)
        rollout = run_single_episode(request["environment"], act, lambda *_: None, episode, **own)
        return rollout_result(rollout, True)

    def _generate(self, action_request: ActionRequest) -> list[int]:
        """The tokens of `generate()`, restricted to action ids."""
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
        return [int(one) for one in ids[0, -policy.num_tokens :]]


class _Allowed(LogitsProcessor):
    """`ActionsOnly` as a logits processor of transformers."""

    def __init__(self, allowed: ActionsOnly) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: Any, scores: Any) -> Tensor:  # (B, L), (B, V)
        found: Tensor = self.allowed(scores, input_ids)
        return found


def rollout_result(found: Rollout, exact: bool) -> RunResult:
    """The result of a rollout; calls are per action, since episodes differ in length."""
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
