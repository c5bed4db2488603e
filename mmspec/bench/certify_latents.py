"""Is a recipe that decodes latents as lossless as it says? Chains with a known answer tell.

Samples of a recipe are held against plain sampling of the same chain, and the noise in its steps
against what it must be. Seeds tell where the theory gives equality: a window of one state is plain
sampling, and so is any window whose draft model is the target itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.bench.certificate import ALPHA, Certificate, Check, outcome, verdict
from mmspec.bench.chains import CPU, Chains, Setting, plain, sample, settings
from mmspec.bench.forecasts import same_seeds
from mmspec.bench.gaussian_tests import cells, distance, increments, lines, moments
from mmspec.bench.progress import Progress, silent
from mmspec.drafters.denoising.window import Window
from mmspec.laws.noise import KeyedNoise
from mmspec.recipe import Recipe

BATCH = 1000
TESTS = ("increments", "moments", "chi-square", "KS")
ELSEWHERE = 1 << 20  # seed of the plain samples


def certify_latents(
    plan: Recipe, *, seeds: int = 50, samples: int = 6000, progress: Progress = silent
) -> Certificate:
    """Test a recipe of denoising chains, or measure one that forecasts within the network."""
    name = plan.name or "custom"
    if not isinstance(plan.execution, Window):
        off, check = same_seeds(plan, min(seeds, 4), progress)
        words = "relative distance of pictures with the same seed"
        return Certificate(
            name, plan.exact, verdict(plan, [check]), [check], off, distance_of=words
        )
    places = settings()
    checks, gaps = [], []
    for place in places:
        found, gap = _frequencies(plan, place, samples, ALPHA / len(places), progress)
        checks.append(found)
        gaps.append(gap)
    checks += [_window_of_one(plan, places[0], seeds), _rows(plan, places[0], seeds)]
    if plan.takes_drafter:
        checks.append(_twin(plan, places[0], seeds))
    words = "largest gap of distribution functions along lines, chance included"
    return Certificate(
        name, plan.exact, verdict(plan, checks), checks, max(gaps), distance_of=words
    )


def _frequencies(
    plan: Recipe, setting: Setting, samples: int, alpha: float, progress: Progress
) -> tuple[Check, float]:
    """All tests on one chain; returns the distance from plain sampling too.

    An alarm is checked once, with four times as many new samples, and only then counts.
    """
    passed, calls, values, gap, chance = True, 0.0, dict[str, float](), 0.0, 0.0
    for attempt in range(2):
        many = samples * 4**attempt
        mine = _many(plan, setting, many, 2 * attempt, progress)
        theirs = _many(plain(plan), setting, many, 2 * attempt + ELSEWHERE, progress)
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
    return Check(f"frequencies, {setting.name}", outcome(plan, passed), detail), gap


def _p_values(setting: Setting, states: Tensor, theirs: Tensor) -> dict[str, float]:
    mine, data = states[:, -1], setting.data
    found = (
        increments(setting, states),
        moments(mine, theirs),
        cells(data, mine, theirs),
        lines(data, mine, theirs),
    )
    return dict(zip(TESTS, found, strict=True))


def _many(plan: Recipe, setting: Setting, samples: int, seed: int, progress: Progress) -> Chains:
    """Samples in batches, rows being independent."""
    parts = []
    for first in range(0, samples, BATCH):
        last = min(first + BATCH, samples)
        parts.append(sample(plan, setting, range(first, last), seed))
        progress(f"sample, {setting.name}", last, samples)
    return Chains(torch.cat([part.states for part in parts]), sum(part.calls for part in parts))


def _window_of_one(plan: Recipe, setting: Setting, seeds: int) -> Check:
    """Nothing is drafted, so every bit is the sampler's own."""
    reference = _sequential(setting, seeds)
    found = sample(plain(plan), setting, range(seeds))
    return _same("window of one", plan, reference, found.states, "the sampler's own chain")


def _twin(plan: Recipe, setting: Setting, seeds: int) -> Check:
    """A draft model that is the target drafts what plain sampling does, and all is accepted."""
    found = sample(plan, setting, range(seeds), small=setting.denoiser)
    reference = sample(plain(plan), setting, range(seeds))
    return _same("target as its own drafter", plan, reference.states, found.states, "plain's chain")


def _rows(plan: Recipe, setting: Setting, seeds: int) -> Check:
    """A chain belongs to its seed and row id, whatever is sampled beside it."""
    together = sample(plan, setting, range(seeds))
    alone = [sample(plan, setting, [row]).states for row in range(seeds)]
    return _same("rows alone", plan, together.states, torch.cat(alone), "the chain of the batch")


def _same(name: str, plan: Recipe, wanted: Tensor, found: Tensor, what: str) -> Check:
    same = (wanted == found).flatten(1).all(1)
    detail = f"{int(same.sum())} of {len(same)} seeds give {what}, bit for bit"
    passed = bool(same.all())
    return Check(f"seeded equality, {name}", outcome(plan, passed), detail)


def _sequential(setting: Setting, seeds: int) -> Tensor:  # -> (B, N + 1, d)
    """The sampler by hand: mean and noise of every state, one after the other."""
    noise = KeyedNoise.seeded(0, seeds, CPU, range(seeds))
    rows, kernel = torch.arange(seeds), setting.kernel
    at = torch.zeros(seeds, 1, dtype=torch.int64)
    states = [noise.shared(at).normal(setting.width)[:, 0]]
    for step in range(kernel.steps):
        steps = torch.full((seeds,), step)
        clean = setting.denoiser.predict(states[-1], steps, rows).clean
        mean = kernel.mean(states[-1], clean, steps)
        eps = noise.shared(at + step + 1).normal(setting.width)[:, 0]
        states.append(mean + kernel.deviation(steps, mean) * eps)
    return torch.stack(states, 1)
