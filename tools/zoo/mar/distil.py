"""Distil a MAR drafter on the denoising steps of the target's diffusion head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mmspec.models.mar import MarForImageGeneration
from mmspec.targets.continuous.patches import CellQuery, PatchSettings
from mmspec.targets.continuous.paths import PathDistribution
from mmspec.training.fitting import CosineDecay, TrainingRun, fit, split_parameters
from tools.zoo.mar.training import DRAWS, MaskedExample, gather_tokens, layers


def distil_drafter(
    model: MarForImageGeneration,
    target: MarForImageGeneration,
    examples: Iterator[MaskedExample],
    plan: PatchSettings,
    decay: CosineDecay,
    run: TrainingRun,
) -> None:
    """Train a drafter on the target's distributions of denoising paths, with the sampler `plan`."""

    def loss_of(example: MaskedExample) -> Tensor:
        with torch.no_grad():
            target_paths = distribution(target, example, plan)
        return path_divergence(
            target_paths,
            distribution(model, example, plan),
            gather_tokens(example.tokens, example.positions),
        )

    matrices, others = split_parameters(layers(model), model.parameters())
    fit(others, examples, loss_of, decay, "follow", run, matrices)


def distribution(
    model: MarForImageGeneration, example: MaskedExample, plan: PatchSettings
) -> PathDistribution:  # batch (B M,)
    """Distributions of the paths of all masked tokens, each as the next token."""
    reach = example.shown.sum(-1) + 1
    real = torch.ones_like(example.positions, dtype=torch.bool)
    rows = torch.arange(len(real))
    query = CellQuery(example.tokens, example.shown, example.positions, real, rows, reach)
    return model.distribution(model.make_sampler(plan), query, example.classes).reshape(
        real.numel()
    )


def path_divergence(
    p: PathDistribution, q: PathDistribution, clean: Tensor
) -> Tensor:  # (R, C) -> ()
    """KL(p || q) of paths per token, estimated at `DRAWS` of the steps; `clean` is data.

    A path is a chain of Gaussian steps, so the divergence is a sum over steps.
    """
    kernel = p.head.kernel
    clean = clean.repeat(DRAWS, 1)
    step = torch.randint(kernel.num_steps, (len(clean),))
    alpha, sigma = (table.float()[step, None] for table in (kernel.alpha, kernel.sigma))
    states = alpha * clean + sigma * torch.randn_like(clean)
    (mean, std), (own, wide) = (_step(distribution, states, step) for distribution in (p, q))
    ratio = (std / wide).square()
    each = 0.5 * (ratio - 1 - ratio.log() + ((mean - own) / wide).square())
    return kernel.num_steps * each.sum(-1).mean()


def init_from_target(model: MarForImageGeneration, target: MarForImageGeneration) -> None:
    """Copy all weights that fit from the target, and the last of its layers."""
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
    """The number of layers of a part, from the names of its weights."""
    inner = [name.removeprefix(f"{part}.") for name in names if name.startswith(f"{part}.")]
    return 1 + max(int(name.split(".")[0]) for name in inner)


def _step(distribution: PathDistribution, states: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std of the next state."""
    times = len(states) // len(distribution.scale)
    condition, scale = distribution.condition.repeat(times, 1, 1), distribution.scale.repeat(times)
    prediction = distribution.head.predict(states, step, condition, scale)
    assert prediction.std is not None
    return distribution.head.kernel.mean(states, prediction.clean, step), prediction.std
