"""Tiny diffusers pipelines with random weights, called without text encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor

STEPS = 8


def dit(scheduler: Any = None) -> Any:
    """Class-conditional, guided by doubling the batch."""
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=1000,
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4)
    scheduler = scheduler or diffusers.DDIMScheduler()
    return _quiet(diffusers.DiTPipeline(network.eval(), vae.eval(), scheduler))


def flux() -> Any:
    """Dual-stream and single-stream blocks; true guidance calls the network twice."""
    network = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        axes_dims_rope=(2, 2, 4),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    vae = diffusers.AutoencoderKL(block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4)
    pipe = diffusers.FluxPipeline(scheduler, vae, None, None, None, None, network.eval())
    return _quiet(pipe)


def sd3() -> Any:
    """Joint blocks, one of them with a second attention; guided by doubling the batch."""
    network = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=6,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4)
    pipe = diffusers.StableDiffusion3Pipeline(
        network.eval(), scheduler, vae, None, None, None, None, None, None
    )
    return _quiet(pipe)


def draw(pipe: Any, images: int = 2, seed: int = 3, calling: Any = None, **extra: Any) -> Tensor:
    """Pictures or latents of one guided call; conditions are random but fixed."""
    made: dict[str, Any] = {
        "num_inference_steps": STEPS,
        "generator": [torch.Generator().manual_seed(seed + index) for index in range(images)],
    }
    if isinstance(pipe, diffusers.DiTPipeline):
        made |= {"class_labels": [5, 7, 11][:images], "output_type": "pt", "guidance_scale": 2.0}
    else:
        fixed = torch.Generator().manual_seed(0)
        for name in ("prompt", "negative_prompt"):
            made[f"{name}_embeds"] = torch.randn(images, 3, 12, generator=fixed)
            made["negative_pooled_prompt_embeds" if "neg" in name else "pooled_prompt_embeds"] = (
                torch.randn(images, 6, generator=fixed)
            )
        made |= {"output_type": "latent", "height": 8, "width": 8}
        if isinstance(pipe, diffusers.FluxPipeline):
            made["true_cfg_scale"] = 2.0
    torch.manual_seed(seed)  # the DiT pipeline gives its scheduler no generator
    result: Tensor = (calling or pipe)(**made | extra).images
    return result


PIPELINES: dict[str, Callable[[], Any]] = {"dit": dit, "flux": flux, "sd3": sd3}


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe
