"""Benchmark and certification of MAR models.

A target may generate an image in fewer steps, so with fewer calls, from another distribution. A
lossy recipe has to beat that, so every recipe is compared with the target in as many steps as the
recipe made calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from mmspec.bench.certificate import ALPHA, Check, Trial, outcome
from mmspec.bench.gaussian_tests import standard_normal_p_values, uniform_gap
from mmspec.bench.reporting import Progress, describe_device
from mmspec.bench.timing import RUN_ERRORS
from mmspec.bench.workload import group_batches, repeat_prompts
from mmspec.modalities.common import measures
from mmspec.modalities.mar import MODALITY, checkpoints, tiny_models
from mmspec.modalities.mar.accelerated import AcceleratedMarModel
from mmspec.modalities.mar.plug import bind, decode_latents, parse_plan_settings, session
from mmspec.modalities.mar.reader import class_tensor
from mmspec.modality import Quality, Runner, RunResult, Selection, Speculative, Workload
from mmspec.recipe import Recipe
from mmspec.targets.continuous.patches import PatchSettings

SCORING_BATCH = 32  # images per call that are scored but not timed
COUNTED = 3  # requests that measure the calls of a recipe
BATCH = 1000  # toy images at a time
SEEDS = 4  # of a user's model, whose images take time
ROUNDING = 1e-3  # relative distance from rounding in other batches
DISTANCE = "largest gap of the distribution function of the cell innovations, chance included"
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """Held-out classes and image scores for bundled models; the user's prompts otherwise."""
    batch, seed = selection.batch, selection.seed
    if selection.prompts is not None or not formatter.source.startswith("zoo:"):
        timed = [
            formatter.request(group) for group in repeat_prompts(selection.prompts or ["0"], batch)
        ]
        return of_requests(model, timed, batch=batch)
    timed_labels = group_batches(checkpoints.classes(selection.count, seed), batch)
    together = min(SCORING_BATCH, max(settings.pictures, 1))
    scored_labels = group_batches(checkpoints.classes(settings.pictures, seed + 1), together)
    timed, judged = (
        [formatter.request([str(number) for number in group]) for group in groups]
        for groups in (timed_labels, scored_labels)
    )
    labels = [number for group in scored_labels or timed_labels for number in group]
    facts = measures.facts_quality(partial(checkpoints.facts_of, labels))
    return of_requests(model, timed, judged, (facts,), batch)


def of_requests(
    model: Any,
    timed: Sequence[Request],
    judged: Sequence[Request] = (),
    qualities: Sequence[Quality] = (),
    batch: int = 1,
) -> Workload:
    """Workload of requests, arguments of `generate_images`; plain decoding is `model.sample`."""

    def fewer_step_baselines(
        recipes: Mapping[str, Runner], seed: int, progress: Progress
    ) -> tuple[Mapping[str, Runner], Mapping[str, str]]:
        found: dict[str, Runner] = {}
        for done, one in enumerate(recipes.values()):
            try:
                calls = [one.run(request, seed).calls for request in timed[:COUNTED]]
            except RUN_ERRORS:  # reported where it is timed
                continue
            steps = min(max(round(sum(calls) / len(calls)), 1), _plan(timed[0]).steps - 1)
            found[f"plain, {steps} steps"] = OwnSampling(model, steps)
            progress("count calls", done + 1, len(recipes))
        return found, {}

    hidden = ("class_labels", "prompt", "vae", "row_ids")
    return Workload(
        timed=timed,
        plain=OwnSampling(model),
        fast=SpeculativeSampling,
        peers=fewer_step_baselines,
        judged=judged,
        qualities=qualities,
        batch=batch,
        settings={name: value for name, value in timed[0].items() if name not in hidden},
        **describe_device(model),
    )


class SpeculativeSampling(Speculative):
    """The speculative loop with a recipe."""

    def run(self, request: Request, seed: int) -> RunResult:
        out = self.fast.generate_images(**request, seed=seed)
        calls, exact = out.stats.target_calls, out.stats.exact
        return RunResult(None, len(out.latents), calls, exact, out.images, out.stats)


@dataclass(frozen=True)
class OwnSampling(Runner):
    """The model's own sampling, in the requested number of steps or in fewer."""

    model: Any
    steps: int | None = None

    def run(self, request: Request, seed: int) -> RunResult:
        plan = _plan(request)
        used = replace(plan, steps=self.steps or plan.steps)
        latents = self.model.sample(class_tensor(self.model, request["class_labels"]), used, seed)
        images = decode_latents(request.get("vae"), latents, self.model.config.latent_scale)
        exact = used.steps == plan.steps
        return RunResult(None, len(latents), used.steps, exact, images)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Test a recipe on Gaussian images, whose distribution is known in closed form.

    Draft models have wrong means, wrong spreads, or both. With the target as its own draft model
    the image must equal that of plain sampling, and so for the user's model.
    """
    bound = bind(recipe, tiny_models.TARGET, tiny_models.TARGET).recipe
    results = _checks(recipe, bound, trial)
    return bound, results if trial.fast is None else chain(results, [_check_self_drafting(trial)])


def _checks(recipe: Recipe, bound: Recipe, trial: Trial) -> Iterator[Check]:
    for name in tiny_models.DRAFTS:
        yield _check_frequencies(recipe, bound, name, trial)
    target, seeds = tiny_models.TARGET, range(trial.seeds)
    parts = bind(recipe, target, target).parts(tiny_models.PLAN)
    found = tiny_models.sample_images(target, parts, seeds)
    wanted = tiny_models.sample_images(target, tiny_models.plain_parts(), seeds)
    same = (found.latents == wanted.latents).all(-1)
    detail = f"{int(same.sum())} of {trial.seeds} seeds give the plain image bit for bit"
    yield Check("draft = target", outcome(bound, bool(same.all())), detail)


def _check_self_drafting(trial: Trial) -> Check:
    """Compare the user's model as its own draft model with its plain sampling."""
    assert trial.fast is not None
    model, plan = trial.fast.model, trial.fast.recipe
    twin = AcceleratedMarModel(session(model, plan, model, {}), MODALITY, {})
    gaps, seeds = list[float](), min(trial.seeds, SEEDS)
    for seed in range(seeds):
        request = trial.requests[seed % len(trial.requests)]
        wanted = model.sample(class_tensor(model, request["class_labels"]), _plan(request), seed)
        found = twin.generate_images(**request, seed=seed).latents
        gaps.append(float((found - wanted).norm() / wanted.norm()))
        trial.progress("draw", seed + 1, seeds)
    detail = (
        f"{sum(gap <= ROUNDING for gap in gaps)} of {seeds} seeds give the plain image, up to "
        "rounding"
    )
    return Check("draft = target, this model", outcome(plan, max(gaps) <= ROUNDING), detail)


def _check_frequencies(recipe: Recipe, bound: Recipe, name: str, trial: Trial) -> Check:
    """Test the cell innovations with one draft model.

    A failure is repeated once with four times as many new samples, and only then counts.
    """
    alpha = ALPHA / len(tiny_models.DRAFTS)
    passed, values, gap, fewer, count = True, [1.0], 0.0, 0.0, 0
    for attempt in range(2):
        count = trial.samples * 4**attempt
        added, rounds = _sample_innovations(recipe, name, count, attempt, trial.progress)
        values = standard_normal_p_values(added)
        gap = max(uniform_gap(torch.special.ndtr(column)) for column in added.unbind(1))
        fewer = count * tiny_models.PLAN.steps / rounds
        passed = min(values) >= alpha / len(values)
        if passed:
            break
    detail = (
        f"smallest p {min(values):.2g} of {len(values)} KS tests ({count} samples, alpha "
        f"{alpha / len(values):.1e} each); {fewer:.1f} times fewer calls than plain sampling; "
        f"largest gap {gap:.3f}"
    )
    return Check(f"frequencies, {name}", outcome(bound, passed), detail, gap, DISTANCE)


def _sample_innovations(
    recipe: Recipe, name: str, count: int, seed: int, progress: Progress
) -> tuple[torch.Tensor, int]:
    """Cell innovations (count, L), and the calls used for them."""
    parts = bind(recipe, tiny_models.TARGET, tiny_models.DRAFTS[name]).parts(tiny_models.PLAN)
    found, rounds = [], 0
    for first in range(0, count, BATCH):
        rows = range(first, min(first + BATCH, count))
        images = tiny_models.sample_images(tiny_models.TARGET, parts, rows, seed)
        found.append(tiny_models.innovations(tiny_models.TARGET, images))
        rounds += sum(bool(new) for round_ in images.rounds for new in round_.tokens)
        progress(f"sample, {name}", rows.stop, count)
    return torch.cat(found), rounds


def _plan(request: Request) -> PatchSettings:
    return PatchSettings(**parse_plan_settings(request))
