"""How models of token ids are measured, whatever their prompt is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from mmspec.api import Accelerated, accelerate
from mmspec.bench import checks, constant
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.environment import placed
from mmspec.bench.frequency import Subject
from mmspec.bench.progress import Progress
from mmspec.bench.workload import agreement
from mmspec.drafters.plain import Silent
from mmspec.modalities.common.baselines import Generate, SpeculativeGenerate, stock
from mmspec.modality import Quality, Runner, Workload
from mmspec.recipe import Recipe

OWN = "generate"
REPLAYED = 8  # requests whose forwards are made again alone
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")


def raced(
    requests: Sequence[Mapping[str, Any]],
    plain: Accelerated,
    ours: Callable[[Any], Runner],
    own: Callable[[Accelerated], Runner],
    **more: Any,
) -> Workload:
    """Requests for our loop and the model's own; `more` are further fields of the workload."""
    both: dict[str, Any] = {"settings": settings_of(requests), **more}
    return Workload(
        timed=requests,
        plain=ours(plain),
        fast=ours,
        baselines={OWN: own(plain)},
        **both,
        **placed(plain.model),
    )


def settings_of(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is said of how to answer: words and numbers of the first request."""
    return {name: one for name, one in requests[0].items() if isinstance(one, str | int | float)}


def of_requests(
    model: Any,
    requests: Sequence[Mapping[str, Any]],
    quality: Quality | None = None,
    batch: int = 1,
    drafter: Any = None,
) -> Workload:
    """Requests are arguments of `generate`; without a quality, tokens are held against its own."""

    def peers(
        recipes: Mapping[str, Runner], seed: int, progress: Progress
    ) -> tuple[Mapping[str, Runner], Mapping[str, str]]:
        return stock(model, drafter, requests, batch, seed, progress)

    said = settings_of(requests)
    return Workload(
        timed=requests,
        plain=SpeculativeGenerate(accelerate(model, "plain")),
        fast=SpeculativeGenerate,
        baselines={OWN: Generate(model)},
        peers=peers,
        controls=partial(constant.controls, model),
        qualities=(quality or agreement(OWN),),
        batch=batch,
        is_greedy=not (said.get("do_sample") or said.get("temperature")),
        replayed=REPLAYED,
        settings=said,
        **placed(model),
    )


class Tiny(Protocol):
    """Tiny models of a modality, whose distributions can be counted: its module `toys`."""

    def bound(self, recipe: Recipe, seed: int) -> Accelerated: ...
    def asked(self) -> dict[str, Any]: ...
    def writing(self, fast: Accelerated) -> Subject: ...


def certify(toys: Tiny, recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Tiny models are counted; equality is asked of the user's own where there is one.

    Raises ValueError for a recipe that needs picture tokens.
    """
    if "codebook" in recipe.options and trial.fast is None:
        raise ValueError("it needs a codebook, which models that write have none of")
    try:
        toy = toys.bound(recipe, 0)
    except ValueError as error:
        toy, why = None, str(error)
    fast = trial.fast or toy
    if fast is None:
        untried = Check("frequencies", "skipped", f"does not run on a tiny model: {why}")
        return recipe, iter([checks.enumeration(recipe, recipe.verifier), untried])
    return fast.recipe, _checks(toys, fast, recipe, trial)


def counted(
    recipe: Recipe,
    trial: Trial,
    bound: Callable[[Recipe, int], Accelerated],
    subject: Callable[[Accelerated], Subject],
    unit: str,
    equalities: Callable[[Accelerated, Trial], Iterator[Check]],
) -> tuple[Recipe, Iterator[Check]]:
    """Tiny models are counted; `equalities` are asked of the user's own where there is one.

    Raises ValueError for a recipe that needs picture tokens, or cannot be bound to a tiny model.
    """
    if "codebook" in recipe.options:
        raise ValueError("it needs a codebook of pictures, which such models have none of")
    small = bound(recipe, 0)
    fast = trial.fast or small
    plan = fast.recipe

    def found() -> Iterator[Check]:
        yield checks.enumeration(plan, small.recipe.verifier)
        yield checks.frequency(plan, lambda seed: subject(bound(recipe, seed)), trial, unit)
        yield from equalities(fast, trial)

    return plan, found()


def _checks(toys: Tiny, fast: Accelerated, recipe: Recipe, trial: Trial) -> Iterator[Check]:
    plan, requests = fast.recipe, trial.requests or [toys.asked()]
    yield checks.enumeration(plan, plan.verifier)
    yield checks.frequency(
        plan, lambda seed: toys.writing(toys.bound(recipe, seed)), trial, "tokens"
    )
    mine = SpeculativeGenerate(fast)
    bare = [{n: v for n, v in one.items() if n not in SAMPLING} for one in requests]
    greedy = [{**one, "do_sample": False} for one in bare]
    yield checks.greedy_equality(plan, Generate(fast.model), mine, greedy, trial, "generate()")
    is_plain = isinstance(fast.session.bound.drafter, Silent)
    plain = None if is_plain else SpeculativeGenerate(accelerate(fast.model, "plain"))
    sampled = [{**one, "do_sample": True, "temperature": 1.0} for one in bare]
    yield checks.seeded_equality(plan, plain, mine, sampled, trial)
