"""Is a recipe that decodes latents as lossless as it says? Chains with a known answer tell.

Samples of a recipe are held against the sampler done by hand, and the noise in its steps against
what it must be. Seeds tell where the theory gives equality: a window of one state is the sampler,
and so is any window whose draft model is the target itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mmspec.api import accelerate
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


def certify(recipe: Recipe, trial: Trial) -> tuple[Recipe, Iterator[Check]]:
    """Test a recipe of chains, or measure one that forecasts within the network.

    Raises ValueError for a model of the user: none is needed.
    """
    if trial.fast is not None:
        raise ValueError("latents are tested on chains with a known answer; give no model")
    if not isinstance(recipe.execution, Window):
        return recipe, iter([_same_seeds(recipe, min(trial.seeds, 4), trial.progress)])
    plan, _ = toys.bound(recipe, toys.settings()[0])
    return plan, _checks(recipe, plan, trial)


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


def _same_seeds(plan: Recipe, seeds: int, progress: Progress) -> Check:
    """What forecasts lose: pictures of a tiny pipeline, against its own."""
    pipe = toys.tiny_pipeline()
    fast = accelerate(pipe, plan)
    asked = {"class_labels": list(CLASSES), "num_inference_steps": STEPS}
    gaps = []
    for seed in range(seeds):
        wanted = own_pictures(pipe, asked, seed)
        found = pictures(fast(**asked, seed=seed, output_type="np"))
        gaps.append(apart(wanted, found).relative)
        progress("draw", seed + 1, seeds)
    mean, counted = sum(gaps) / len(gaps), fast.last_stats
    assert counted is not None
    detail = (
        f"a tiny transformer of random weights, {STEPS} steps, {seeds} seeds of {len(CLASSES)} "
        f"pictures: relative distance {mean:.3g}; {counted.target_calls} of "
        f"{counted.num_new_tokens} steps in full"
    )
    return Check("same seeds", outcome(plan, max(gaps) == 0), detail, mean, PICTURES)
