"""Recipes on denoising chains of a Gaussian mixture with all states returned; a tiny pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from mmspec.decode import Parts, decode
from mmspec.distributions.kernels import GaussianKernel
from mmspec.distributions.noise import KeyedNoise
from mmspec.drafters.denoising.window import Window
from mmspec.modalities.diffusion.mixture import Mixture, mixture, vp_grid
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.targets.continuous.denoising import ChainRequest, ChainTarget, Denoiser
from mmspec.targets.stop import Stop

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ChainSetting:
    """A chain with a closed-form denoiser, and a worse one for recipes with a draft model."""

    name: str
    data: Mixture
    kernel: GaussianKernel

    @property
    def denoiser(self) -> Denoiser:
        return self.data.denoiser(self.kernel)

    @property
    def small(self) -> Denoiser:
        """The optimal denoiser of data of 1.5 times the width: close to the target's, not equal."""
        return replace(self.data, std=1.5 * self.data.std).denoiser(self.kernel)

    @property
    def width(self) -> int:
        """Dimension of a state."""
        return self.data.means.shape[1]


def settings() -> tuple[ChainSetting, ...]:
    """Two chains: DDPM sampling, and less noisy DDIM sampling on another grid."""
    linear, cosine = vp_grid(24, "linear"), vp_grid(16, "cosine")
    return (
        ChainSetting("ancestral", mixture(2, 4, 0), GaussianKernel.ancestral(*linear)),
        ChainSetting("ddim, eta 0.8", mixture(5, 3, 1), GaussianKernel.ddim(*cosine, eta=0.8)),
    )


def plain_recipe(plan: Recipe) -> Recipe:
    """The recipe with a window of one state, which is plain sampling."""
    return replace(plan, execution=Window.constant(1))


@dataclass(frozen=True)
class SampledChains:
    """Sampled chains, and the target calls used for them."""

    states: Tensor  # (B, N + 1, d), the start first
    calls: int

    @property
    def final(self) -> Tensor:  # (B, d)
        return self.states[:, -1]


def bind_recipe(
    plan: Recipe, setting: ChainSetting, small: Denoiser | None = None
) -> tuple[Recipe, Parts]:
    """The recipe bound to a chain. Raises ValueError if it does not decode chains."""
    if not isinstance(plan.execution, Window):
        raise ValueError(f"recipe {plan.name or 'custom'!r} does not sample chains")
    target = ChainTarget(setting.denoiser)
    draft = ChainTarget(small or setting.small) if plan.takes_drafter else None
    kit = Kit(target, draft, plan.execution, plan.sees, None, plan.options)
    verifier = resolve(plan.verifier, kit)
    gate = None if plan.gate is None else resolve(plan.gate, kit)
    drafter = pair(plan.architecture(kit), verifier, target)
    parts = Parts(target, drafter, verifier, Stop(setting.kernel.num_steps), gate)
    return replace(plan, verifier=verifier, gate=gate), parts


def sample(
    plan: Recipe,
    setting: ChainSetting,
    row_ids: Sequence[int],
    seed: int = 0,
    small: Denoiser | None = None,
) -> SampledChains:
    """Decode one chain per row id. Raises ValueError if the recipe does not decode chains."""
    _, parts = bind_recipe(plan, setting, small)
    noise, start = _draw_start(setting, row_ids, seed)
    chains, calls = [[first] for first in start], 0
    for round_ in decode(parts, ChainRequest(start, noise)):
        if round_.fallback:
            raise RuntimeError(f"the drafter failed: {round_.fallback}")
        calls += round_.calls
        for row, new in enumerate(round_.tokens):
            chains[row] += new
    return SampledChains(torch.stack([torch.stack(chain) for chain in chains]), calls)


def sample_reference(setting: ChainSetting, row_ids: Sequence[int], seed: int = 0) -> SampledChains:
    """Reference sampler: mean and noise of every state in sequence, without the loop."""
    noise, start = _draw_start(setting, row_ids, seed)
    rows, kernel = torch.arange(len(row_ids)), setting.kernel
    at = torch.zeros(len(row_ids), 1, dtype=torch.int64)
    states = [start]
    for step in range(kernel.num_steps):
        steps = torch.full((len(row_ids),), step)
        clean = setting.denoiser.predict(states[-1], steps, rows).clean
        mean = kernel.mean(states[-1], clean, steps)
        eps = noise.shared_keys(at + step + 1).normal(setting.width)[:, 0]
        states.append(mean + kernel.std_at(steps, mean) * eps)
    return SampledChains(torch.stack(states, 1), kernel.num_steps)


def _draw_start(
    setting: ChainSetting, row_ids: Sequence[int], seed: int
) -> tuple[KeyedNoise, Tensor]:  # and (B, d)
    """The noise of the rows, and their initial states."""
    noise = KeyedNoise.from_seed(seed, len(row_ids), CPU, row_ids)
    at = torch.zeros(len(row_ids), 1, dtype=torch.int64)
    return noise, noise.shared_keys(at).normal(setting.width)[:, 0]


WEIGHT_SCALE = 0.25  # of the usual std: predictions change slowly, as in trained networks


def tiny_pipeline(seed: int = 0) -> Any:
    """A class-conditional diffusion transformer with random weights, DDIM."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = diffusers.DiTTransformer2DModel(
            sample_size=8,
            num_layers=3,
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_embeds_ada_norm=1000,
        )
        sizes = {"block_out_channels": (8,), "latent_channels": 4, "norm_num_groups": 4}
        vae = diffusers.AutoencoderKL(**sizes)
    _randomise(network, WEIGHT_SCALE, seed)
    _randomise(vae, 1.0, seed)
    pipe = diffusers.DiTPipeline(network, vae, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_unet_pipeline(seed: int = 0) -> Any:
    """An unconditional U-Net of two levels with random weights, DDIM."""
    network = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    _randomise(network, WEIGHT_SCALE, seed)
    pipe = diffusers.DDIMPipeline(network, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _randomise(part: nn.Module, gain: float, seed: int) -> None:
    """Weights with `gain` times the usual standard deviation, in eval mode."""
    part.eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in part.parameters():
            if weight.dim() > 1:
                scale = gain * weight[0].numel() ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
