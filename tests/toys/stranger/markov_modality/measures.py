"""How chains are measured: races against plain walking, and distributions in closed form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from markov_modality.formatting import MarkovFormatter
from markov_modality.model import MarkovChain
from markov_modality.settings import MarkovSettings
from markov_modality.walking import ChainTable, distribution
from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench import checks
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.frequency import LENGTH, Subject, refuse_fallback
from mmspec.bench.workload import group_batches, repeat_prompts
from mmspec.distributions.noise import KeyedNoise
from mmspec.modality import Quality, RunResult, RunResults, Selection, Workload
from mmspec.recipe import Recipe

STATES = 4  # of the chains that certificates are made of
Request = Mapping[str, Any]


def workload(
    model: MarkovChain, formatter: MarkovFormatter, settings: MarkovSettings, selection: Selection
) -> Workload:
    """Walks from every state in turn, or from where the user says."""
    batch = selection.batch
    texts = [str((selection.seed + index) % model.states) for index in range(selection.count)]
    groups = (
        group_batches(texts, batch)
        if selection.prompts is None
        else repeat_prompts(selection.prompts, batch)
    )
    timed = [formatter.request(group) for group in groups]
    return Workload(
        timed=timed,
        plain=SpeculativeWalk(accelerate(model, "markov-plain")),
        fast=SpeculativeWalk,
        qualities=(log_likelihood(model),),
        batch=batch,
        is_greedy=settings.temperature == 0,
        settings={name: value for name, value in timed[0].items() if name != "start"},
    )


def log_likelihood(model: MarkovChain) -> Quality:
    """How likely the chain finds a walk, per state."""

    def values(answers: Sequence[RunResult], others: RunResults) -> list[tuple[float, float]]:
        walks = [torch.tensor(answer.output) for answer in answers]
        logs = [model.table.log()[walk[:, :-1], walk[:, 1:]].mean(1) for walk in walks]
        return [(float(value), 1.0) for rows in logs for value in rows]

    return Quality("log likelihood", values)


@dataclass(frozen=True)
class SpeculativeWalk:
    """The loop of mmspec with some recipe."""

    fast: Accelerated

    def run(self, request: Request, seed: int) -> RunResult:
        out = self.fast.generate(**request, seed=seed)
        return build_result(out.states, out.stats.target_calls, out.stats.exact, out.stats)

    def run_first_token(self, request: Request, seed: int) -> None:
        return None


@dataclass(frozen=True)
class ByHand:
    """The chain, one state after the other, without anything of the loop."""

    model: MarkovChain

    def run(self, request: Request, seed: int) -> RunResult:
        last = torch.tensor(request["start"])[:, None]
        noise, walk = KeyedNoise.from_seed(seed, len(last), last.device), [last]
        for day in range(1, request["days"] + 1):
            keys = noise.shared_keys(torch.full_like(last, day))
            last = distribution(self.model, last, request["temperature"]).sample(keys)
            walk.append(last)
        return build_result(torch.cat(walk, 1), request["days"])

    def run_first_token(self, request: Request, seed: int) -> None:
        return None


def build_result(states: Tensor, calls: int, exact: bool = True, stats: Any = None) -> RunResult:
    """Walks (B, 1 + days) as races know them."""
    new = states[:, 1:]
    return RunResult(new.tolist(), new.numel(), calls, exact, states.tolist(), stats)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Counted on random chains; equality is asked of the user's own where there is one.

    Raises ValueError for a recipe whose drafter is no chain.
    """
    fast = trial.fast or pair(recipe, 0)
    return fast.recipe, _checks(fast, recipe, trial)


def pair(recipe: Recipe, seed: int) -> Accelerated:
    """A random chain under a recipe, with a random draft model where it takes one."""
    model = MarkovChain.random(STATES, seed)
    small = [one.random(ChainTable(model), seed + 1) for one in recipe.draft_model]
    return accelerate(model, recipe, drafter=next(iter(small), None), modality="markov")


def _checks(fast: Accelerated, recipe: Recipe, trial: Trial) -> Iterator[Check]:
    plan = fast.recipe
    yield checks.enumeration(plan, plan.verifier)
    yield checks.frequency(plan, lambda seed: subject(pair(recipe, seed)), trial, "states")
    requests = trial.requests or [
        {"start": [state, 0], "days": 12, "temperature": 1.0} for state in range(STATES)
    ]
    mine, hand = SpeculativeWalk(fast), ByHand(fast.model)
    greedy = [{**one, "temperature": 0.0} for one in requests]
    yield checks.greedy_equality(plan, hand, mine, greedy, trial, "walking by hand")
    yield checks.seeded_equality(plan, hand, mine, requests, trial)


def subject(fast: Accelerated) -> Subject:
    """Walks of three states from state 0, and their distribution in closed form."""
    table = fast.model.table.double()
    joint = table[0][:, None, None] * table[:, :, None] * table[None]

    def sample(batch: int, first: int, seed: int) -> Tensor:
        rows = range(first, first + batch)
        out = fast.generate(start=[0] * batch, days=LENGTH, seed=seed, row_ids=rows)
        refuse_fallback(out.stats)
        states: Tensor = out.states[:, 1:]
        return states

    return Subject(joint, sample)
