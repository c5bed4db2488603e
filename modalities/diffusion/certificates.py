"""Is a recipe that decodes latents as lossless as it says? Chains with a known answer tell.

Samples of a recipe are held against the sampler done by hand, and the noise in its steps against
what it must be. Seeds tell where the theory gives equality: a window of one state is the sampler,
and so is any window whose draft model is the target itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.api import Accelerated, accelerate
from mmspec.bench.certificate import ALPHA, Check, Trial, outcome
from mmspec.bench.gaussian_tests import moments
from mmspec.bench.progress import Progress
from mmspec.drafters.denoising.window import Window
from mmspec.modalities.diffusion import toys
from mmspec.modalities.diffusion.picture_distance import apart, own_pictures, pictures
from mmspec.modalities.diffusion.sample_tests import cells, distance, increments, lines
from mmspec.modalities.diffusion.toys import ChainSetting, SampledChains, by_hand, plain, sample
from mmspec.recipe import Recipe

BATCH = 1000
TESTS = ("increments", "moments", "chi-square", "KS")
ELSEWHERE = 1 << 20  # seed of the samples that are compared with
LINES = "largest gap of distribution functions along lines, chance included"
PICTURES = "relative distance of pictures with the same seed"
STEPS = 50  # of the tiny pipeline
CLASSES = (0, 1, 2, 3)
SEEDS = 4  # of pipelines, whose pictures take time
ROUNDING = 1e-3  # relative distance that a network's rounding in other batches may make


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Test a recipe of chains, or measure one that forecasts within the network.

    The distributions of chains are held against chains with a known answer. A pipeline of the user
    tells whether it is sampled as it would be without drafts.
    """
    if not isinstance(recipe.execution, Window):
        return recipe, iter([_same_seeds(recipe, trial)])
    plan, _ = toys.bound(recipe, toys.settings()[0])
    found = _checks(recipe, plan, trial)
    return plan, found if trial.fast is None else chain(found, [_drafting_nothing(recipe, trial)])


def _checks(recipe: Recipe, plan: Recipe, trial: Trial) -> Iterator[Check]:
    places, seeds = toys.settings(), range(trial.seeds)
    for place in places:
        yield _frequencies(recipe, plan, place, trial, ALPHA / len(places))
    place = places[0]
    wanted = by_hand(place, seeds).states
    one = sample(plain(recipe), place, seeds).states
    yield _same("window of one", plan, wanted, one, "the sampler's own chain")
    together = sample(recipe, place, seeds).states
    alone = torch.cat([sample(recipe, place, [row]).states for row in seeds])
    yield _same("rows alone", plan, together, alone, "the chain of the batch")
    if plan.takes_drafter:
        twin = sample(recipe, place, seeds, small=place.denoiser).states
        yield _same("target as its own drafter", plan, wanted, twin, "the sampler's own chain")


def _frequencies(
    recipe: Recipe, plan: Recipe, setting: ChainSetting, trial: Trial, alpha: float
) -> Check:
    """All tests on one chain, and the distance from the sampler.

    An alarm is checked once, with four times as many new samples, and only then counts.
    """

    def hand(rows: range, seed: int) -> SampledChains:
        return by_hand(setting, rows, seed)

    def ours(rows: range, seed: int) -> SampledChains:
        return sample(recipe, setting, rows, seed)

    passed, calls, values, gap, chance, many = True, 0.0, dict[str, float](), 0.0, 0.0, 0
    for attempt in range(2):
        many = trial.samples * 4**attempt
        mine = _many(ours, many, 2 * attempt, setting.name, trial.progress)
        theirs = _many(hand, many, 2 * attempt + ELSEWHERE, setting.name, trial.progress)
        values = _p_values(setting, mine.states, theirs.final)
        passed = min(values.values()) >= alpha / len(values)
        gap, chance = distance(setting.data, mine.final, theirs.final)
        calls = theirs.calls / mine.calls
        if passed:
            break
    shown = ", ".join(f"{name} p {value:.2g}" for name, value in values.items())
    detail = (
        f"{shown} ({many} samples, alpha {alpha / len(values):.1e} each); {calls:.1f} times fewer "
        f"calls than plain sampling in batches of {BATCH}; largest gap {gap:.3f}, where chance "
        f"makes one of {chance:.3f} on a line"
    )
    return Check(f"frequencies, {setting.name}", outcome(plan, passed), detail, gap, LINES)


def _p_values(setting: ChainSetting, states: Tensor, theirs: Tensor) -> dict[str, float]:
    mine, data = states[:, -1], setting.data
    found = (
        increments(setting, states),
        moments(mine, theirs),
        cells(data, mine, theirs),
        lines(data, mine, theirs),
    )
    return dict(zip(TESTS, found, strict=True))


def _many(
    draw: Callable[[range, int], SampledChains],
    samples: int,
    seed: int,
    name: str,
    progress: Progress,
) -> SampledChains:
    """Samples in batches, rows being independent."""
    parts = []
    for first in range(0, samples, BATCH):
        last = min(first + BATCH, samples)
        parts.append(draw(range(first, last), seed))
        progress(f"sample, {name}", last, samples)
    states = torch.cat([part.states for part in parts])
    return SampledChains(states, sum(part.calls for part in parts))


def _same(name: str, plan: Recipe, wanted: Tensor, found: Tensor, what: str) -> Check:
    same = (wanted == found).flatten(1).all(1)
    detail = f"{int(same.sum())} of {len(same)} seeds give {what}, bit for bit"
    return Check(f"seeded equality, {name}", outcome(plan, bool(same.all())), detail)


def _drafting_nothing(recipe: Recipe, trial: Trial) -> Check:
    """The user's pipeline where a draft can change nothing: in one of its own, or without any."""
    assert trial.fast is not None
    pipe = trial.fast.model
    way = {"drafter": pipe} if recipe.takes_drafter else {"window": 1}
    fast, bare = accelerate(pipe, recipe, **way), accelerate(pipe, "paradigms", window=1)
    gaps = _gaps(trial, lambda asked, seed: pictures(bare(**asked, seed=seed)), fast)
    words = "drafting for itself" if recipe.takes_drafter else "in windows of one"
    detail = (
        f"{sum(gap <= ROUNDING for gap in gaps)} of {len(gaps)} seeds: a {type(pipe).__name__} "
        f"{words} draws what it draws without drafts, up to rounding"
    )
    passed = max(gaps) <= ROUNDING
    return Check("this pipeline", outcome(fast.recipe, passed), detail, max(gaps), PICTURES)


def _same_seeds(plan: Recipe, trial: Trial) -> Check:
    """What forecasts lose: pictures of the user's pipeline or of a tiny one, against its own."""
    fast, requests = trial.fast, trial.requests
    pipe = toys.tiny_pipeline() if fast is None else fast.model
    what = f"a {type(pipe).__name__}"
    if fast is None:
        fast, what = accelerate(pipe, plan), "a tiny transformer of random weights"
        requests = [{"class_labels": list(CLASSES), "num_inference_steps": STEPS}]
    trial = replace(trial, requests=requests)
    gaps = _gaps(trial, lambda asked, seed: own_pictures(pipe, asked, seed), fast)
    mean, counted = sum(gaps) / len(gaps), fast.last_stats
    assert counted is not None
    detail = (
        f"{what}, {len(gaps)} seeds: relative distance {mean:.3g}; {counted.target_calls} of "
        f"{counted.num_new_tokens} steps in full"
    )
    return Check("same seeds", outcome(plan, max(gaps) == 0), detail, mean, PICTURES)


def _gaps(
    trial: Trial, wanted: Callable[[Mapping[str, Any], int], np.ndarray], fast: Accelerated
) -> list[float]:
    """How far a recipe's pictures are from those that are wanted, of a few seeds."""
    found, seeds = list[float](), min(trial.seeds, SEEDS)
    for seed in range(seeds):
        asked = {**trial.requests[seed % len(trial.requests)], "output_type": "np"}
        found.append(apart(wanted(asked, seed), pictures(fast(**asked, seed=seed))).relative)
        trial.progress("draw", seed + 1, seeds)
    return found
