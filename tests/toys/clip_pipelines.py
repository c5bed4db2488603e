"""Tiny diffusers image-to-video pipelines, called with embeddings.

`clip_of(name)` is the pipeline, and the arguments of a call for one clip's latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from PIL import Image

from tests.toys.embedded_pipelines import Built, flow, hunyuan_video, mask, wan_expert, words
from tests.toys.pipelines import randomize


def clip_of(name: str) -> Built:
    """A float32 pipeline with a stochastic flow, and the arguments of a call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, given = BUILDERS[name]()
    return randomize(pipe), {"output_type": "latent", "image": frame(), **given}


def frame(seed: int = 3) -> Any:
    """16 x 16 pixels."""
    pixels = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.byte().numpy())


def wan(in_channels: int, experts: int = 1, **more: Any) -> Built:
    looks = in_channels > 4 and experts == 1  # at the first frame through an encoder as well
    seen = {"image_dim": 6, "added_kv_proj_dim": 24} if looks else {}
    networks = [wan_expert(in_channels, **seen) for _ in range(experts)]
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4,
    )
    settings = {"boundary_ratio": 0.6} if experts == 2 else {}
    pipe = diffusers.WanImageToVideoPipeline(
        None,
        None,
        vae,
        flow(),
        *(_looking() if looks else (None, None)),
        *networks,
        **settings,
        **more,
    )
    given: dict[str, Any] = {"prompt_embeds": words(1), "negative_prompt_embeds": words(2)}
    return pipe, {**given, "num_frames": 5, "height": 16, "width": 16}


def _looking() -> tuple[Any, Any]:
    config = transformers.CLIPVisionConfig(
        hidden_size=6,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    processor = transformers.CLIPImageProcessor(size=16, crop_size=16)
    return processor, transformers.CLIPVisionModel(config)


def hunyuan(kind: str) -> Built:
    """The network gets the first frame as additional channels, or inside the latents."""
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=9 if kind == "latent_concat" else 4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        guidance_embeds=False,
        text_embed_dim=32,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
        image_condition_type=kind,
    )
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    processor = transformers.CLIPImageProcessor(size=16, crop_size=16)
    pipe = diffusers.HunyuanVideoImageToVideoPipeline(
        None, None, transformer, vae, flow(), None, None, processor
    )
    given: dict[str, Any] = {"num_frames": 9, "height": 16, "width": 16, "true_cfg_scale": 3.0}
    for place, end in enumerate(("", "negative_")):
        given[f"{end}prompt_embeds"] = words(place)
        given[f"{end}prompt_attention_mask"] = mask()
        given[f"{end}pooled_prompt_embeds"] = words(5 + place, 8)[:, 0]
    return pipe, given


def hunyuan_15() -> Built:
    config = transformers.SiglipVisionConfig(
        hidden_size=12,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    size = {"height": 16, "width": 16}
    pipe, given = hunyuan_video(
        diffusers.HunyuanVideo15ImageToVideoPipeline,
        transformers.SiglipVisionModel(config),
        transformers.SiglipImageProcessor(size=size),
    )
    return pipe, given


BUILDERS: dict[str, Callable[[], Built]] = {
    "wan-2.1": lambda: wan(12),
    "wan-2.2": lambda: wan(12, experts=2),
    "wan-2.2-tokens": lambda: wan(4, expand_timesteps=True),
    "hunyuan-behind": lambda: hunyuan("latent_concat"),
    "hunyuan-replaced": lambda: hunyuan("token_replace"),
    "hunyuan-1.5": hunyuan_15,
}
