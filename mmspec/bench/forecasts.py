"""What forecasts within a network lose: pictures of a tiny pipeline, against its own."""

from __future__ import annotations

from typing import Any

import torch

from mmspec.bench.certificate import Check, outcome
from mmspec.bench.pictures import apart, own_pictures, pictures
from mmspec.bench.progress import Progress, silent
from mmspec.recipe import Recipe

STEPS = 50
CLASSES = (0, 1, 2, 3)
CALM = 0.25  # of the usual weights: predictions change slowly, as those of trained networks do


def same_seeds(plan: Recipe, seeds: int = 4, progress: Progress = silent) -> tuple[float, Check]:
    """The relative distance of pictures with the same seed, mean over seeds."""
    from mmspec.api import accelerate

    pipe = tiny_pipeline()
    fast = accelerate(pipe, plan)
    asked = {"class_labels": list(CLASSES), "num_inference_steps": STEPS}
    gaps = []
    for seed in range(seeds):
        wanted = own_pictures(pipe, asked, seed)
        found = pictures(fast(**asked, seed=seed, output_type="np"))
        gaps.append(apart(wanted, found).relative)
        progress("draw", seed + 1, seeds)
    mean = sum(gaps) / len(gaps)
    counted = fast.last_stats
    assert counted is not None
    detail = (
        f"a tiny transformer of random weights, {STEPS} steps, {seeds} seeds of {len(CLASSES)} "
        f"pictures: relative distance {mean:.3g}; {counted.target_calls} of "
        f"{counted.num_new_tokens} steps in full"
    )
    return mean, Check("same seeds", outcome(plan, max(gaps) == 0), detail)


def tiny_pipeline(seed: int = 0) -> Any:
    """A class-conditional diffusion transformer with random weights, DDIM."""
    import diffusers

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
        coder = diffusers.AutoencoderKL(**sizes)
    for part, gain in ((network, CALM), (coder, 1.0)):
        part.eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in part.parameters():
                if weight.dim() > 1:
                    scale = gain * weight[0].numel() ** -0.5
                    weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    pipe = diffusers.DiTPipeline(network, coder, diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe
