"""Measurements of token models: requests, `generate()` baselines, and checks of exactness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec import _hf, _hf_cache
from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench import checks
from mmspec.bench import constant_drafter as constant
from mmspec.bench.certificate import Check, Trial
from mmspec.bench.frequency import Subject
from mmspec.bench.reporting import Progress, describe_device
from mmspec.bench.timing import RUN_ERRORS, time_run
from mmspec.bench.workload import Scored, agreement, can_generate, fact_accuracy, group_batches
from mmspec.distributions.call_state import StepwiseProcessor
from mmspec.drafters.plain import NoDraft
from mmspec.modality import Quality, Runner, RunResult, Speculative, Workload
from mmspec.recipe import Recipe
from mmspec.zoo.prompts import prompts
from mmspec.zoo.scene import Scene
from mmspec.zoo.scene_parser import parse_images, score_picture

OWN_GENERATE = "generate"
COMPILED_GENERATE = "generate, compiled"
REPLAYED = 8  # requests whose forwards are repeated alone
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")


def race_workload(
    requests: Sequence[Mapping[str, Any]],
    plain: Accelerated,
    ours: Callable[[Any], Runner],
    own: Callable[[Accelerated], Runner],
    **more: Any,
) -> Workload:
    """Make a workload of requests for our loop and the model's own; `more` are further fields."""
    both: dict[str, Any] = {"settings": extract_settings(requests), **more}
    return Workload(
        timed=requests,
        plain=ours(plain),
        fast=ours,
        baselines={OWN_GENERATE: own(plain)},
        **both,
        **describe_device(plain.model),
    )


def extract_settings(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of the first request: its strings and numbers."""
    return {name: one for name, one in requests[0].items() if isinstance(one, str | int | float)}


def request_workload(
    model: Any,
    requests: Sequence[Mapping[str, Any]],
    quality: Quality | None = None,
    batch: int = 1,
    drafter: Any = None,
) -> Workload:
    """Make a workload of `generate` requests; default quality: agreement with `generate()`."""

    def peers(
        recipes: Mapping[str, Runner], seed: int, progress: Progress
    ) -> tuple[Mapping[str, Runner], Mapping[str, str]]:
        found, missing = stock_baselines(model, drafter, requests, batch, seed, progress)
        if any(is_compiled(one) for one in recipes.values()):
            found[COMPILED_GENERATE] = CompiledGenerate(model)
        return found, missing

    settings = extract_settings(requests)
    return Workload(
        timed=requests,
        plain=SpeculativeGenerate(accelerate(model, "plain")),
        fast=SpeculativeGenerate,
        baselines={OWN_GENERATE: Generate(model)},
        peers=peers,
        controls=partial(constant.make_controls, model),
        qualities=(quality or agreement(OWN_GENERATE),),
        batch=batch,
        is_greedy=not (settings.get("do_sample") or settings.get("temperature")),
        replayed=REPLAYED,
        settings=settings,
        **describe_device(model),
    )


class Tiny(Protocol):
    """A module of tiny models of a modality, whose output distributions can be enumerated."""

    def bind_recipe(self, recipe: Recipe, seed: int) -> Accelerated: ...
    def make_request(self) -> dict[str, Any]: ...
    def make_subject(self, fast: Accelerated) -> Subject: ...


def certify(tiny: Tiny, recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Test frequencies on tiny models, and token equality on the user's model, if given.

    Raises ValueError for a recipe that needs image tokens.
    """
    if "codebook" in recipe.options and trial.fast is None:
        raise ValueError("it needs a codebook, which text models do not have")
    try:
        toy = tiny.bind_recipe(recipe, 0)
    except ValueError as error:
        toy, why = None, str(error)
    fast = trial.fast or toy
    if fast is None:
        untried = Check("frequencies", "skipped", f"does not run on a tiny model: {why}")
        return recipe, iter([checks.enumeration(recipe, recipe.verifier), untried])
    return fast.recipe, _iterate_checks(tiny, fast, recipe, trial)


def certify_counts(
    recipe: Recipe,
    trial: Trial,
    bound: Callable[[Recipe, int], Accelerated],
    subject: Callable[[Accelerated], Subject],
    unit: str,
    equalities: Callable[[Accelerated, Trial], Iterator[Check]],
) -> tuple[Recipe, Iterator[Check]]:
    """Test frequencies on tiny models, and `equalities` on the user's model, if given.

    Raises ValueError for a recipe that needs image tokens, or cannot be bound to a tiny model.
    """
    if "codebook" in recipe.options:
        raise ValueError("it needs a codebook of image tokens, which such models do not have")
    small = bound(recipe, 0)
    fast = trial.fast or small
    plan = fast.recipe

    def run_checks() -> Iterator[Check]:
        yield checks.enumeration(plan, small.recipe.verifier)
        yield checks.frequency(plan, lambda seed: subject(bound(recipe, seed)), trial, unit)
        yield from equalities(fast, trial)

    return plan, run_checks()


def _iterate_checks(tiny: Tiny, fast: Accelerated, recipe: Recipe, trial: Trial) -> Iterator[Check]:
    plan, requests = fast.recipe, trial.requests or [tiny.make_request()]
    yield checks.enumeration(plan, plan.verifier)
    yield checks.frequency(
        plan, lambda seed: tiny.make_subject(tiny.bind_recipe(recipe, seed)), trial, "tokens"
    )
    mine = SpeculativeGenerate(fast)
    bare = [{n: v for n, v in one.items() if n not in SAMPLING} for one in requests]
    greedy = [{**one, "do_sample": False} for one in bare]
    yield checks.greedy_equality(plan, Generate(fast.model), mine, greedy, trial, "generate()")
    is_plain = isinstance(fast.session.bound.drafter, NoDraft)
    plain = None if is_plain else SpeculativeGenerate(accelerate(fast.model, "plain"))
    sampled = [{**one, "do_sample": True, "temperature": 1.0} for one in bare]
    yield checks.seeded_equality(plan, plain, mine, sampled, trial)


def held_out_prompts(count: int, batch: int, seed: int) -> tuple[list[list[str]], list[Scene]]:
    """Return held-out prompts in whole batches, and their scenes."""
    groups = group_batches(prompts(count, seed=seed), batch)
    scenes = [one.scene for group in groups for one in group]
    return [[one.text for one in group] for group in groups], scenes


def score_images(scenes: Sequence[Scene], pictures: Sequence[Any]) -> list[tuple[int, int]]:
    """Return (facts right, facts required) of every image."""
    shown = parse_images(pictures)
    return [score_picture(scene, one) for scene, one in zip(scenes, shown, strict=True)]


def facts_quality(score: Callable[[Sequence[Any]], Scored]) -> Quality:
    """Return the quality "facts right" over the images in `RunResult.output` of all results."""

    def score_results(results: Sequence[RunResult]) -> Scored:
        return score([picture for result in results for picture in result.output])

    return fact_accuracy(score_results)


LENGTHS = range(3, 9)  # draft lengths tried for assisted generation
MAX_COPIED = 10  # `prompt_lookup_num_tokens`
PEERS = ("assisted_as_shipped", "assisted", "prompt_lookup")
Request = Mapping[str, Any]


@dataclass(frozen=True)
class Generate:
    """`model.generate()`, with extra arguments for assisted generation or prompt lookup."""

    model: Any
    extra: Mapping[str, Any] = field(default_factory=dict)

    def run(self, request: Request, seed: int) -> RunResult:
        if request.get("do_sample"):
            torch.manual_seed(seed)
        with count_forwards(self.model) as calls:
            ids = self.model.generate(**_constrain_steps(self.model, request), **self.extra)
        tokens = extract_new_tokens(self.model, ids, prompt_length(request))
        prefills = 1 if all(calls) else sum(calls)  # recurrent states have no length
        return RunResult(tokens, sum(map(len, tokens)), max(len(calls) - prefills, 0))

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**request, "max_new_tokens": 1}, seed)


def _constrain_steps(model: Any, request: Request) -> Request:
    """The request with its grammar as a processor of the library's own steps."""
    if "grammar" not in request:
        return request
    given = dict(request)
    grammar, eos = given.pop("grammar"), _hf.eos_ids(model.generation_config)
    size = model.get_output_embeddings().weight.shape[0]
    rows = [grammar] * len(request["input_ids"])
    return {**given, "logits_processor": [StepwiseProcessor(grammar.bind(rows, size, eos))]}


def is_compiled(runner: Runner) -> bool:
    """Whether a runner is a recipe with `compile=True`."""
    return isinstance(runner, Speculative) and bool(runner.fast.given.get("compile"))


@dataclass(frozen=True)
class CompiledGenerate:
    """`model.generate()` with a static cache and compiled steps; the prompt is read eager.

    transformers keeps the compiled forward on the model. Target calls are those of single tokens.
    """

    model: Any

    def run(self, request: Request, seed: int) -> RunResult:
        if request.get("do_sample"):
            torch.manual_seed(seed)
        mode = "default" if self.model.device.type == "cpu" else "reduce-overhead"
        ids = self.model.generate(**request, **_hf_cache.compiled_generation(mode))
        tokens = extract_new_tokens(self.model, ids, prompt_length(request))
        return RunResult(tokens, sum(map(len, tokens)), ids.shape[1] - prompt_length(request) - 1)

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**request, "max_new_tokens": 1}, seed)


@dataclass(frozen=True)
class AssistedGenerate:
    """Assisted generation of transformers with threshold 0, constant schedule, k draft tokens.

    transformers reads these from the assistant's generation config, which is restored afterwards.
    """

    model: Any
    drafter: Any
    k: int

    def run(self, request: Request, seed: int) -> RunResult:
        with _assistant_config(self.drafter, self.k):
            return Generate(self.model, {"assistant_model": self.drafter}).run(request, seed)

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**request, "max_new_tokens": 1}, seed)


class SpeculativeGenerate(Speculative):
    """Our loop with a recipe."""

    def run(self, request: Request, seed: int) -> RunResult:
        out = self.fast.generate(**request, seed=seed)
        tokens = extract_new_tokens(self.fast.model, out.sequences, prompt_length(request))
        stats = out.stats
        return RunResult(
            tokens, sum(map(len, tokens)), stats.target_calls, stats.exact, stats=stats
        )

    def run_first_token(self, request: Request, seed: int) -> RunResult:
        return self.run({**request, "max_new_tokens": 1}, seed)


def stock_baselines(
    model: Any, drafter: Any, requests: Sequence[Request], batch: int, seed: int, progress: Progress
) -> tuple[dict[str, Runner], dict[str, str]]:
    """Return the speculative methods of transformers, and the reasons for missing ones.

    Assisted generation is included twice: with its default settings, and tuned.
    """
    if batch > 1:
        return {}, dict.fromkeys(PEERS, "transformers speculates at batch 1 only")
    found: dict[str, Runner] = {}
    missing: dict[str, str] = {}
    if drafter is None:
        missing |= dict.fromkeys(PEERS[:2], "no draft model was given")
    elif not can_generate(drafter):
        why = "the draft model is a head, and transformers takes one with a generate() of its own"
        missing |= dict.fromkeys(PEERS[:2], why)
    else:
        shipped = Generate(model, {"assistant_model": drafter})
        try:
            shipped.run(requests[0], seed)
            tuned = tune_assisted(model, drafter, requests, seed, progress)
            found |= dict(zip(PEERS, (shipped, tuned), strict=False))
        except RUN_ERRORS as error:
            missing |= dict.fromkeys(PEERS[:2], f"{type(error).__name__}: {error}")
    found["prompt_lookup"] = Generate(model, {"prompt_lookup_num_tokens": MAX_COPIED})
    return found, missing


def tune_assisted(
    model: Any, drafter: Any, requests: Sequence[Request], seed: int, progress: Progress
) -> AssistedGenerate:
    """Return assisted generation with the draft length that is fastest on the first requests."""
    candidates = [AssistedGenerate(model, drafter, k) for k in LENGTHS]
    times = []
    for index, one in enumerate(candidates):
        one.run(requests[0], seed)
        spent = [time_run(one, request, seed, model.device) for request in requests[:4]]
        times.append(sum(s for s, _ in spent) / max(sum(a.count for _, a in spent), 1))
        progress("choose k of assisted generation", index + 1, len(candidates))
    return candidates[times.index(min(times))]


def prompt_length(request: Request) -> int:
    """Return the number of prompt tokens in the output; 0 for Whisper's `generate()`."""
    ids = request.get("input_ids")
    return 0 if ids is None else int(ids.shape[1])


def extract_new_tokens(model: Any, sequences: Tensor, length: int) -> list[list[int]]:
    """Return the tokens after the prompt, up to and including the first end token of a row."""
    ends = model.generation_config.eos_token_id
    final = set(ends if isinstance(ends, list) else [ends])
    rows = []
    for row in sequences[:, length:].tolist():
        end = next((index for index, token in enumerate(row) if token in final), len(row))
        rows.append(row[: end + 1])
    return rows


@contextmanager
def count_forwards(model: Any) -> Iterator[list[bool]]:
    """Record of each forward whether the cache is empty: Whisper has a prefill per window."""
    calls: list[bool] = []

    def record(_: Any, args: Any, arguments: dict[str, Any]) -> None:
        cache = _hf_cache.pop_cache({**arguments})
        calls.append(cache is None or not cache.get_seq_length())

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@contextmanager
def _assistant_config(drafter: Any, k: int) -> Iterator[None]:
    original = drafter.generation_config
    changed = deepcopy(original)
    changed.num_assistant_tokens = k
    changed.num_assistant_tokens_schedule = "constant"
    changed.assistant_confidence_threshold = 0.0
    drafter.generation_config = changed
    try:
        yield
    finally:
        drafter.generation_config = original
