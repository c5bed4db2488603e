"""Certification of recipes that decode latents, on chains with a closed-form denoiser.

Samples of a recipe are compared with a reference sampler, and the noise of its steps with standard
normals. Samples must be equal by seed where theory requires it: for a window of one state, and for
any window whose draft model is the target itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench.certificate import ALPHA, Check, Trial, outcome
from mmspec.bench.gaussian_tests import moments
from mmspec.bench.reporting import Progress
from mmspec.drafters.denoising.window import Window
from mmspec.modalities.diffusion import tiny_models
from mmspec.modalities.diffusion.image_distance import (
    compare_images,
    generate_reference,
    output_images,
)
from mmspec.modalities.diffusion.sample_tests import (
    cell_p_value,
    increment_p_value,
    projection_distance,
    projection_p_value,
)
from mmspec.modalities.diffusion.tiny_models import (
    ChainSetting,
    SampledChains,
    plain_recipe,
    sample,
    sample_reference,
)
from mmspec.recipe import Recipe

BATCH = 1000
TESTS = ("increments", "moments", "chi-square", "KS")
REFERENCE_SEED = 1 << 20  # of the reference samples
LINES = "largest gap of distribution functions along lines, chance included"
IMAGES = "relative distance of images with the same seed"
STEPS = 50  # of the tiny pipeline
IMAGES_PER_CALL = 4
TINY: tuple[tuple[str, Callable[[], Any], dict[str, Any]], ...] = (
    ("transformer", tiny_models.tiny_pipeline, {"class_labels": list(range(IMAGES_PER_CALL))}),
    ("U-Net", tiny_models.tiny_unet_pipeline, {"batch_size": IMAGES_PER_CALL}),
)
SEEDS = 4  # of pipelines, whose images take time
ROUNDING = 1e-3  # relative distance from rounding in other batches


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Test a recipe that samples chains, or measure one that forecasts network outputs.

    Distributions are tested on chains with a closed-form denoiser. A user's pipeline is compared
    with its sampling without drafts.
    """
    if not isinstance(recipe.execution, Window):
        return recipe, iter([_measure_forecasts(recipe, trial)])
    plan, _ = tiny_models.bind_recipe(recipe, tiny_models.settings()[0])
    found = _checks(recipe, plan, trial)
    return plan, found if trial.fast is None else chain(found, [_check_pipeline(recipe, trial)])


def _checks(recipe: Recipe, plan: Recipe, trial: Trial) -> Iterator[Check]:
    settings, seeds = tiny_models.settings(), range(trial.seeds)
    for setting in settings:
        yield _check_frequencies(recipe, plan, setting, trial, ALPHA / len(settings))
    setting = settings[0]
    expected = sample_reference(setting, seeds).states
    one = sample(plain_recipe(recipe), setting, seeds).states
    yield _check_equality("window of one", plan, expected, one, "the sampler's own chain")
    together = sample(recipe, setting, seeds).states
    alone = torch.cat([sample(recipe, setting, [row]).states for row in seeds])
    yield _check_equality("rows alone", plan, together, alone, "the chain of the batch")
    if plan.takes_drafter:
        self_drafted = sample(recipe, setting, seeds, small=setting.denoiser).states
        yield _check_equality(
            "target as its own drafter", plan, expected, self_drafted, "the sampler's own chain"
        )


def _check_frequencies(
    recipe: Recipe, plan: Recipe, setting: ChainSetting, trial: Trial, alpha: float
) -> Check:
    """All tests on one chain, and the distance from the reference sampler.

    A failure is repeated once with four times as many new samples, and only then counts.
    """

    def sample_by_hand(rows: range, seed: int) -> SampledChains:
        return sample_reference(setting, rows, seed)

    def ours(rows: range, seed: int) -> SampledChains:
        return sample(recipe, setting, rows, seed)

    passed, calls, values, gap, chance, count = True, 0.0, dict[str, float](), 0.0, 0.0, 0
    for attempt in range(2):
        count = trial.samples * 4**attempt
        samples = _sample_batches(ours, count, 2 * attempt, setting.name, trial.progress)
        reference = _sample_batches(
            sample_by_hand, count, 2 * attempt + REFERENCE_SEED, setting.name, trial.progress
        )
        values = _p_values(setting, samples.states, reference.final)
        passed = min(values.values()) >= alpha / len(values)
        gap, chance = projection_distance(setting.data, samples.final, reference.final)
        calls = reference.calls / samples.calls
        if passed:
            break
    shown = ", ".join(f"{name} p {value:.2g}" for name, value in values.items())
    detail = (
        f"{shown} ({count} samples, alpha {alpha / len(values):.1e} each); {calls:.1f} times fewer "
        f"calls than plain sampling in batches of {BATCH}; largest gap {gap:.3f}, "
        f"{chance:.3f} by chance on one line"
    )
    return Check(f"frequencies, {setting.name}", outcome(plan, passed), detail, gap, LINES)


def _p_values(setting: ChainSetting, states: Tensor, reference: Tensor) -> dict[str, float]:
    samples, data = states[:, -1], setting.data
    found = (
        increment_p_value(setting, states),
        moments(samples, reference),
        cell_p_value(data, samples, reference),
        projection_p_value(data, samples, reference),
    )
    return dict(zip(TESTS, found, strict=True))


def _sample_batches(
    draw: Callable[[range, int], SampledChains],
    samples: int,
    seed: int,
    name: str,
    progress: Progress,
) -> SampledChains:
    """Samples in batches of independent rows."""
    parts = []
    for first in range(0, samples, BATCH):
        last = min(first + BATCH, samples)
        parts.append(draw(range(first, last), seed))
        progress(f"sample, {name}", last, samples)
    states = torch.cat([part.states for part in parts])
    return SampledChains(states, sum(part.calls for part in parts))


def _check_equality(name: str, plan: Recipe, expected: Tensor, found: Tensor, label: str) -> Check:
    same = (expected == found).flatten(1).all(1)
    detail = f"{int(same.sum())} of {len(same)} seeds give {label}, bit for bit"
    return Check(f"seeded equality, {name}", outcome(plan, bool(same.all())), detail)


def _check_pipeline(recipe: Recipe, trial: Trial) -> Check:
    """Compare the user's pipeline, with itself as draft model or without, to plain sampling."""
    assert trial.fast is not None
    pipe = trial.fast.model
    options = {"drafter": pipe} if recipe.takes_drafter else {"window": 1}
    fast, bare = accelerate(pipe, recipe, **options), accelerate(pipe, "paradigms", window=1)
    gaps = _image_distances(
        trial, lambda request, seed: output_images(bare(**request, seed=seed)), fast
    )
    label = "as its own draft model" if recipe.takes_drafter else "with windows of one"
    detail = (
        f"{sum(gap <= ROUNDING for gap in gaps)} of {len(gaps)} seeds: a {type(pipe).__name__} "
        f"{label} gives the images of plain sampling, up to rounding"
    )
    passed = max(gaps) <= ROUNDING
    return Check("this pipeline", outcome(fast.recipe, passed), detail, max(gaps), IMAGES)


def _measure_forecasts(plan: Recipe, trial: Trial) -> Check:
    """Measure the loss of forecasts, on images of the user's pipeline or of a tiny one."""
    fast, requests = trial.fast, trial.requests
    if fast is None:
        fast, label, request = _accelerate_tiny_pipeline(plan)
        requests = [{**request, "num_inference_steps": STEPS}]
    else:
        label = f"a {type(fast.model).__name__}"
    pipe = fast.model
    trial = replace(trial, requests=requests)
    gaps = _image_distances(
        trial, lambda request, seed: generate_reference(pipe, request, seed), fast
    )
    mean, counted = sum(gaps) / len(gaps), fast.last_stats
    assert counted is not None
    detail = (
        f"{label}, {len(gaps)} seeds: relative distance {mean:.3g}; {counted.target_calls} of "
        f"{counted.num_new_tokens} steps in full"
    )
    return Check("same seeds", outcome(plan, max(gaps) == 0), detail, mean, IMAGES)


def _accelerate_tiny_pipeline(plan: Recipe) -> tuple[Accelerated, str, dict[str, Any]]:
    """The first tiny pipeline whose network the recipe takes, what it is, and its request.

    Raises ValueError if it takes none.
    """
    refused = list[str]()
    for label, build, request in TINY:
        fast: Any = accelerate(build(), plan)
        try:
            detach = fast.session.runner.forecasting.attach(fast.model)
        except ValueError as error:
            refused.append(str(error))
            continue
        detach()
        return fast, f"a tiny {label} of random weights", request
    raise ValueError("; ".join(refused))


def _image_distances(
    trial: Trial, expected: Callable[[Mapping[str, Any], int], np.ndarray], fast: Accelerated
) -> list[float]:
    """Distances of a recipe's images from reference images, for a few seeds."""
    found, seeds = list[float](), min(trial.seeds, SEEDS)
    for seed in range(seeds):
        request = {**trial.requests[seed % len(trial.requests)], "output_type": "np"}
        found.append(
            compare_images(
                expected(request, seed), output_images(fast(**request, seed=seed))
            ).relative
        )
        trial.progress("draw", seed + 1, seeds)
    return found
