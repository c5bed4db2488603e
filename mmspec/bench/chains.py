"""Recipes run on denoising chains of a mixture, with every state on the way kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.bench.mixture import Mixture, mixture, vp_grid
from mmspec.decode import Parts, decode
from mmspec.drafters.denoising.window import Window
from mmspec.laws.kernels import GaussianKernel
from mmspec.laws.noise import KeyedNoise
from mmspec.recipe import Kit, Recipe, made, pair
from mmspec.targets.denoising import ChainRequest, ChainTarget, Denoiser
from mmspec.targets.stop import Stop

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """A chain whose denoiser is a formula, and a worse denoiser for recipes that take one."""

    name: str
    data: Mixture
    kernel: GaussianKernel

    @property
    def denoiser(self) -> Denoiser:
        return self.data.denoiser(self.kernel)

    @property
    def small(self) -> Denoiser:
        """The best denoiser of data half as wide again: near the target's, and never it."""
        return replace(self.data, std=1.5 * self.data.std).denoiser(self.kernel)

    @property
    def width(self) -> int:
        """Numbers per state."""
        return self.data.means.shape[1]


def settings() -> tuple[Setting, ...]:
    """Two chains: the sampler of DDPM, and a less noisy one on another grid."""
    linear, cosine = vp_grid(24, "linear"), vp_grid(16, "cosine")
    return (
        Setting("ancestral", mixture(2, 4, 0), GaussianKernel.ancestral(*linear)),
        Setting("ddim, eta 0.8", mixture(5, 3, 1), GaussianKernel.ddim(*cosine, eta=0.8)),
    )


def plain(plan: Recipe) -> Recipe:
    """The recipe with a window of one state, which drafts nothing: plain sampling."""
    return replace(plan, execution=Window.fixed(1))


@dataclass(frozen=True)
class Chains:
    """What a recipe sampled, and what it took."""

    states: Tensor  # (B, N + 1, d), the start first
    calls: int

    @property
    def final(self) -> Tensor:  # (B, d)
        return self.states[:, -1]


def sample(
    plan: Recipe,
    setting: Setting,
    row_ids: Sequence[int],
    seed: int = 0,
    small: Denoiser | None = None,
) -> Chains:
    """Decode one chain per row id. Raises ValueError where the recipe does not decode chains."""
    if not isinstance(plan.execution, Window):
        raise ValueError(f"recipe {plan.name or 'custom'!r} does not sample a chain of its own")
    batch, target = len(row_ids), ChainTarget(setting.denoiser)
    draft = ChainTarget(small or setting.small) if plan.takes_drafter else None
    kit = Kit(target, draft, plan.execution, plan.sees, None, plan.options)
    verifier = made(plan.verifier, kit)
    drafter = pair(plan.architecture(kit), verifier, target)
    noise = KeyedNoise.seeded(seed, batch, CPU, row_ids)
    at = torch.zeros(batch, 1, dtype=torch.int64)
    start = noise.shared(at).normal(setting.width)[:, 0]
    chains, calls = [[first] for first in start], 0
    parts = Parts(target, drafter, verifier, Stop(setting.kernel.steps), plan.gate)
    for kept in decode(parts, ChainRequest(start, noise)):
        if kept.fallback:
            raise RuntimeError(f"the drafter failed: {kept.fallback}")
        calls += kept.calls
        for row, new in enumerate(kept.tokens):
            chains[row] += new
    return Chains(torch.stack([torch.stack(chain) for chain in chains]), calls)
