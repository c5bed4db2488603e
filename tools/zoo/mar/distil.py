"""Teach a small MAR model to follow a larger one: to take its diffusion head's very steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mmspec.models.mar import MarForImageGeneration
from mmspec.targets.continuous.patches import CellQuery, PatchSettings
from mmspec.targets.continuous.paths import PathDistribution
from mmspec.training.fitting import Course, Fall, divided, fit
from tools.zoo.mar.training import DRAWS, MaskedLesson, hidden, layers


def follow(
    model: MarForImageGeneration,
    target: MarForImageGeneration,
    taught: Iterator[MaskedLesson],
    plan: PatchSettings,
    fall: Fall,
    course: Course,
) -> None:
    """Train a drafter to have the target's distributions of paths under the sampler of `plan`."""

    def loss_of(lesson: MaskedLesson) -> Tensor:
        with torch.no_grad():
            wanted = distribution(target, lesson, plan)
        return apart(
            wanted, distribution(model, lesson, plan), hidden(lesson.tokens, lesson.places)
        )

    matrices, others = divided(layers(model), model.parameters())
    fit(others, taught, loss_of, fall, "follow", course, matrices)


def distribution(
    model: MarForImageGeneration, lesson: MaskedLesson, plan: PatchSettings
) -> PathDistribution:  # batch (B M,)
    """The paths of all hidden tokens, each as if it came next."""
    reach = lesson.shown.sum(-1) + 1
    real = torch.ones_like(lesson.places, dtype=torch.bool)
    rows = torch.arange(len(real))
    asked = CellQuery(lesson.tokens, lesson.shown, lesson.places, real, rows, reach)
    return model.distribution(model.sampled(plan), asked, lesson.classes).reshape(real.numel())


def apart(p: PathDistribution, q: PathDistribution, clean: Tensor) -> Tensor:  # (R, C) -> ()
    """Divergence of paths q from paths p, per token, at `DRAWS` of the steps; `clean` is data.

    A path is a chain of Gaussian steps, so this is a sum over steps.
    """
    kernel = p.head.kernel
    clean = clean.repeat(DRAWS, 1)
    step = torch.randint(kernel.steps, (len(clean),))
    alpha, sigma = (table.float()[step, None] for table in (kernel.alpha, kernel.sigma))
    states = alpha * clean + sigma * torch.randn_like(clean)
    (mean, std), (own, wide) = (_step(distribution, states, step) for distribution in (p, q))
    ratio = (std / wide).square()
    each = 0.5 * (ratio - 1 - ratio.log() + ((mean - own) / wide).square())
    return kernel.steps * each.sum(-1).mean()


def begin_like(model: MarForImageGeneration, target: MarForImageGeneration) -> None:
    """Begin with all that the target has, too; of its layers, the last."""
    own, other = model.state_dict(), target.state_dict()
    for part in ("encoder", "decoder", "head.blocks"):
        count, all_ = (_depth(names, part) for names in (own, other))
        for index in range(count):
            source, goal = f"{part}.{all_ - count + index}.", f"{part}.{index}."
            for name in [n for n in other if n.startswith(source)]:
                other[goal + name.removeprefix(source)] = other[name]
    fits = {n: w for n, w in other.items() if n in own and own[n].shape == w.shape}
    model.load_state_dict({**own, **fits})


def _depth(names: Iterable[str], part: str) -> int:
    """How many layers a part of a model has, by the names of its weights."""
    inner = [name.removeprefix(f"{part}.") for name in names if name.startswith(f"{part}.")]
    return 1 + max(int(name.split(".")[0]) for name in inner)


def _step(distribution: PathDistribution, states: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std of the state after each."""
    times = len(states) // len(distribution.scale)
    condition, scale = distribution.condition.repeat(times, 1, 1), distribution.scale.repeat(times)
    seen = distribution.head.predict(states, step, condition, scale)
    assert seen.std is not None
    return distribution.head.kernel.mean(states, seen.clean, step), seen.std
