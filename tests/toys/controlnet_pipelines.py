"""Tiny diffusers pipelines with ControlNets and adapters.

`controlled(name)` is the pipeline, and the arguments of a call for one picture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers

from tests.toys.image_to_image_pipelines import SIZES, WORDS, Built, mask, parts, picture
from tests.toys.pipelines import PROMPTS, randomize

STRETCH = {"control_guidance_start": 0.2, "control_guidance_end": 0.7}


def build_pipeline(name: str) -> Built:
    """A float32 pipeline with a stochastic scheduler, and the arguments of a call."""
    pipe, given = BUILDERS[name]()
    return randomize(pipe), {"prompt": PROMPTS[0], **given}


def control(unet: Any, seed: int = 0, **settings: Any) -> Any:
    """A random ControlNet for a UNet."""
    made = diffusers.ControlNetModel.from_unet(
        unet, conditioning_embedding_out_channels=(4,), load_weights_from_unet=False
    )
    made.register_to_config(**settings)
    return made


def sd(
    kind: Any = diffusers.StableDiffusionControlNetPipeline, count: int = 1, **settings: Any
) -> Any:
    made = parts("sd")
    nets = [control(made["unet"], **settings) for _ in range(count)]
    made["controlnet"] = nets if count > 1 else nets[0]
    return kind(**made, requires_safety_checker=False)


def sdxl() -> Any:
    made = parts("sdxl")
    made["controlnet"] = control(made["unet"])
    return diffusers.StableDiffusionXLControlNetPipeline(**made, add_watermarker=False)


def union() -> Any:
    made = parts("sdxl")
    settings = {"num_trans_channel": 8, "num_trans_head": 2, "num_proj_channel": 8}
    made["controlnet"] = diffusers.ControlNetUnionModel.from_config(
        {**made["unet"].config, **settings, "conditioning_embedding_out_channels": (4,)}
    )
    return diffusers.StableDiffusionXLControlNetUnionPipeline(**made, add_watermarker=False)


def sd3(count: int = 1) -> Any:
    made = parts("sd3")
    settings = dict(made["transformer"].config)
    nets = [
        diffusers.SD3ControlNetModel.from_config({**settings, "num_layers": 1})
        for _ in range(count)
    ]
    made["controlnet"] = nets if count > 1 else nets[0]
    return diffusers.StableDiffusion3ControlNetPipeline(**made)


def flux(count: int = 1) -> Any:
    made = parts("flux")
    settings = dict(made["transformer"].config)
    nets = [diffusers.FluxControlNetModel.from_config(settings) for _ in range(count)]
    made["controlnet"] = nets if count > 1 else nets[0]
    return diffusers.FluxControlNetPipeline(**made)


def adapter(name: str) -> Any:
    made, kinds = parts(name), ("CrossAttnDownBlock2D", "DownBlock2D")
    blocks = {"down_block_types": kinds, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    made["unet"] = diffusers.UNet2DConditionModel.from_config({**made["unet"].config, **blocks})
    made["adapter"] = diffusers.T2IAdapter(channels=[8, 16], num_res_blocks=1, downscale_factor=1)
    if name == "sdxl":
        return diffusers.StableDiffusionXLAdapterPipeline(**made)
    del made["image_encoder"]
    return diffusers.StableDiffusionAdapterPipeline(**made, requires_safety_checker=False)


def several(count: int) -> dict[str, Any]:
    """Settings of several ControlNets, each with its own range of steps."""
    return {
        "control_guidance_start": [0.0, 0.3][:count],
        "control_guidance_end": [0.6, 1.0][:count],
        "controlnet_conditioning_scale": [1.0, 0.5][:count],
    }


BUILDERS: dict[str, Callable[[], Built]] = {
    "sd": lambda: (sd(), {"image": picture()}),
    "sd-alone": lambda: (sd(), {"image": picture(), "guidance_scale": 1.0}),
    "sd-guessing": lambda: (sd(), {"image": picture(), "guess_mode": True}),
    "sd-pooled": lambda: (sd(global_pool_conditions=True), {"image": picture()}),
    "sd-for-a-stretch": lambda: (sd(), {"image": picture(), **STRETCH}),
    "sd-several": lambda: (
        sd(count=2),
        {"image": [picture(), picture(4)], **several(2)},
    ),
    "sd-several-guessing": lambda: (
        sd(count=2),
        {"image": [picture(), picture(4)], **several(2), "guess_mode": True},
    ),
    "sd-image": lambda: (
        sd(diffusers.StableDiffusionControlNetImg2ImgPipeline),
        {"image": picture(), "control_image": picture(4), "strength": 0.7},
    ),
    "sd-inpaint": lambda: (
        sd(diffusers.StableDiffusionControlNetInpaintPipeline),
        {"image": picture(), "control_image": picture(4), "mask_image": mask(), **STRETCH},
    ),
    "sdxl": lambda: (sdxl(), {"image": picture(), **STRETCH}),
    "sdxl-union": lambda: (
        union(),
        {"control_image": [picture()], "control_mode": [1], "control_guidance_end": 0.7},
    ),
    "sd3": lambda: (sd3(), {"control_image": picture(), **SIZES, **WORDS}),
    "sd3-several": lambda: (
        sd3(2),
        {"control_image": [picture(), picture(4)], **several(2), **SIZES, **WORDS},
    ),
    "flux": lambda: (
        flux(),
        {
            "control_image": picture(),
            "true_cfg_scale": 3.0,
            "negative_prompt": "x",
            **STRETCH,
            **SIZES,
            **WORDS,
        },
    ),
    "flux-several": lambda: (
        flux(2),
        {
            "control_image": [picture(), picture(4)],
            "control_mode": [None, None],
            **several(2),
            **SIZES,
            **WORDS,
        },
    ),
    "adapter": lambda: (adapter("sd"), {"image": picture()}),
    "adapter-for-a-stretch": lambda: (
        adapter("sdxl"),
        {"image": picture(), "adapter_conditioning_factor": 0.5},
    ),
}
