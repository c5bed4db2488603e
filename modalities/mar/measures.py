"""How models of continuous tokens are measured: classes, a judge, the target in wider steps.

A target may draw a picture in fewer, wider steps and so with fewer calls, at another distribution.
A lossy recipe has to beat that, so every recipe is put beside the target in as many steps as it
made calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from mmspec.api import accelerate
from mmspec.bench.certificate import ALPHA, Check, Trial, outcome
from mmspec.bench.environment import placed
from mmspec.bench.gaussian_tests import standard_normal_p_values, uniform_gap
from mmspec.bench.progress import Progress
from mmspec.bench.workload import grouped, repeated
from mmspec.modalities.common import scenes
from mmspec.modalities.mar import held_out, toys
from mmspec.modalities.mar.plug import bind, decoded, settings_of
from mmspec.modalities.mar.reader import labels
from mmspec.modality import Quality, Runner, RunResult, Selection, Speculative, Workload
from mmspec.recipe import Recipe
from mmspec.targets.continuous.patches import PatchSettings

JUDGED_TOGETHER = 32  # pictures per call of those that are only looked at
COUNTED = 3  # requests that tell how many calls a recipe makes
BATCH = 1000  # toy pictures at a time
SEEDS = 4  # of a model of the user, whose pictures take time
ROUNDING = 1e-3  # relative distance that rounding in other batches may make
DISTANCE = "largest gap of the distribution function of what a cell adds, chance included"
Request = Mapping[str, Any]


def workload(model: Any, formatter: Any, settings: Any, selection: Selection) -> Workload:
    """The classes of the zoo, judged by reading the pictures; else what the user asks for."""
    batch, seed = selection.batch, selection.seed
    if selection.prompts is not None or not formatter.source.startswith("zoo:"):
        timed = [formatter.request(group) for group in repeated(selection.prompts or ["0"], batch)]
        return of_requests(model, timed, batch=batch)
    many = grouped(held_out.classes(selection.count, seed), batch)
    together = min(JUDGED_TOGETHER, max(settings.pictures, 1))
    shown = grouped(held_out.classes(settings.pictures, seed + 1), together)
    timed, judged = (
        [formatter.request([str(number) for number in group]) for group in groups]
        for groups in (many, shown)
    )
    asked = [number for group in shown or many for number in group]
    facts = scenes.judged_by(partial(held_out.facts_of, asked))
    return of_requests(model, timed, judged, (facts,), batch)


def of_requests(
    model: Any,
    timed: Sequence[Request],
    judged: Sequence[Request] = (),
    qualities: Sequence[Quality] = (),
    batch: int = 1,
) -> Workload:
    """Requests are arguments of `generate_images`; plain decoding is the model's own sampling."""

    def wider(
        recipes: Mapping[str, Runner], seed: int, progress: Progress
    ) -> tuple[Mapping[str, Runner], Mapping[str, str]]:
        found: dict[str, Runner] = {}
        for done, one in enumerate(recipes.values()):
            calls = [one.run(asked, seed).calls for asked in timed[:COUNTED]]
            steps = min(max(round(sum(calls) / len(calls)), 1), _plan(timed[0]).steps - 1)
            found[f"plain, {steps} steps"] = OwnSampling(model, steps)
            progress("count calls", done + 1, len(recipes))
        return found, {}

    hidden = ("class_labels", "prompt", "vae", "row_ids")
    return Workload(
        timed=timed,
        plain=OwnSampling(model),
        fast=SpeculativeSampling,
        peers=wider,
        judged=judged,
        qualities=qualities,
        batch=batch,
        settings={name: value for name, value in timed[0].items() if name not in hidden},
        **placed(model),
    )


class SpeculativeSampling(Speculative):
    """Our loop with some recipe."""

    def run(self, request: Request, seed: int) -> RunResult:
        out = self.fast.generate_images(**request, seed=seed)
        calls, exact = out.stats.target_calls, out.stats.exact
        return RunResult(None, len(out.latents), calls, exact, out.images, out.stats)


@dataclass(frozen=True)
class OwnSampling(Runner):
    """The model's own sampling, in its own steps or in fewer, wider ones."""

    model: Any
    steps: int | None = None

    def run(self, request: Request, seed: int) -> RunResult:
        plan = _plan(request)
        taken = replace(plan, steps=self.steps or plan.steps)
        latents = self.model.sample(labels(self.model, request["class_labels"]), taken, seed)
        images = decoded(request.get("vae"), latents, self.model.config.latent_scale)
        exact = taken.steps == plan.steps
        return RunResult(None, len(latents), taken.steps, exact, images)


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Gaussian pictures tell, whose distribution is known in closed form.

    Draft models are wrong in their means, in their spreads, or in both; one that is the target
    itself gives the plain picture. So does a model of the user that drafts for itself.
    """
    bound = bind(recipe, toys.TARGET, toys.TARGET).recipe
    found = _checks(recipe, bound, trial)
    return bound, found if trial.fast is None else chain(found, [_drafting_for_itself(trial)])


def _checks(recipe: Recipe, bound: Recipe, trial: Trial) -> Iterator[Check]:
    for name in toys.DRAFTS:
        yield _frequencies(recipe, bound, name, trial)
    found = toys.draw(
        toys.TARGET, bind(recipe, toys.TARGET, toys.TARGET).parts(toys.PLAN), range(trial.seeds)
    )
    wanted = toys.draw(toys.TARGET, toys.plain_parts(), range(trial.seeds))
    same = (found.latents == wanted.latents).all(-1)
    detail = f"{int(same.sum())} of {trial.seeds} seeds give the plain picture bit for bit"
    yield Check("draft = target", outcome(bound, bool(same.all())), detail)


def _drafting_for_itself(trial: Trial) -> Check:
    """A model of the user as its own draft model, against its plain sampling."""
    assert trial.fast is not None
    model, plan = trial.fast.model, trial.fast.recipe
    twin = accelerate(model, plan, drafter=model)
    gaps, seeds = list[float](), min(trial.seeds, SEEDS)
    for seed in range(seeds):
        request = trial.requests[seed % len(trial.requests)]
        wanted = model.sample(labels(model, request["class_labels"]), _plan(request), seed)
        found = twin.generate_images(**request, seed=seed).latents
        gaps.append(float((found - wanted).norm() / wanted.norm()))
        trial.progress("draw", seed + 1, seeds)
    detail = (
        f"{sum(gap <= ROUNDING for gap in gaps)} of {seeds} seeds give the plain picture, up to "
        "rounding"
    )
    return Check("draft = target, this model", outcome(plan, max(gaps) <= ROUNDING), detail)


def _frequencies(recipe: Recipe, bound: Recipe, name: str, trial: Trial) -> Check:
    """What cells add, tested on one draft model.

    An alarm is checked once, with four times as many new samples, and only then counts.
    """
    alpha = ALPHA / len(toys.DRAFTS)
    passed, values, gap, fewer, many = True, [1.0], 0.0, 0.0, 0
    for attempt in range(2):
        many = trial.samples * 4**attempt
        added, rounds = _added(recipe, name, many, attempt, trial.progress)
        values = standard_normal_p_values(added)
        gap = max(uniform_gap(torch.special.ndtr(column)) for column in added.unbind(1))
        fewer = many * toys.PLAN.steps / rounds
        passed = min(values) >= alpha / len(values)
        if passed:
            break
    detail = (
        f"least p {min(values):.2g} of {len(values)} KS tests ({many} samples, alpha "
        f"{alpha / len(values):.1e} each); {fewer:.1f} times fewer calls than plain sampling; "
        f"largest gap {gap:.3f}"
    )
    return Check(f"frequencies, {name}", outcome(bound, passed), detail, gap, DISTANCE)


def _added(
    recipe: Recipe, name: str, many: int, seed: int, progress: Progress
) -> tuple[torch.Tensor, int]:
    """What each cell adds to what was known (many, L), and the calls that took."""
    parts = bind(recipe, toys.TARGET, toys.DRAFTS[name]).parts(toys.PLAN)
    found, rounds = [], 0
    for first in range(0, many, BATCH):
        rows = range(first, min(first + BATCH, many))
        drawn = toys.draw(toys.TARGET, parts, rows, seed)
        found.append(toys.innovations(toys.TARGET, drawn))
        rounds += sum(bool(new) for kept in drawn.rounds for new in kept.tokens)
        progress(f"sample, {name}", rows.stop, many)
    return torch.cat(found), rounds


def _plan(request: Request) -> PatchSettings:
    return PatchSettings(**settings_of(request))
