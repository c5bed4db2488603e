"""Tiny diffusers image-to-image pipelines: the parts of `pipelines`, other calls.

`from_picture(name)` is the pipeline, and the arguments of a call for one picture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor

from tests.toys.embedded_pipelines import cogvideo_network, words
from tests.toys.pipelines import (
    LONGEST,
    PROMPTS,
    autoencoder,
    conditional,
    flux,
    pipeline,
    randomize,
    stable_diffusion_3,
)

Built = tuple[Any, dict[str, Any]]
SIZES = {"height": 8, "width": 8}
WORDS = {"max_sequence_length": LONGEST}


def from_picture(name: str) -> Built:
    """A float32 pipeline with a stochastic scheduler, and the arguments of a call."""
    pipe, given = BUILDERS[name]()
    pipe.set_progress_bar_config(disable=True)
    return pipe, {"prompt": PROMPTS[0], **given}


def picture(seed: int = 3) -> Tensor:  # (1, 3, 8, 8)
    return torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def mask() -> Tensor:  # (1, 1, 8, 8)
    """The right half, and a corner of the left one."""
    mask_image = torch.zeros(1, 1, 8, 8)
    mask_image[..., 4:] = 1
    mask_image[..., :2, :2] = 1
    return mask_image


def parts(name: str, **other: Any) -> dict[str, Any]:
    return {**pipeline(name).components, **other}


def sd_image() -> Built:
    pipe = diffusers.StableDiffusionImg2ImgPipeline(**parts("sd"), requires_safety_checker=False)
    return pipe, {"image": picture(), "strength": 0.7}


def sdxl_image() -> Built:
    pipe = diffusers.StableDiffusionXLImg2ImgPipeline(**parts("sdxl"), add_watermarker=False)
    return pipe, {"image": picture(), "strength": 0.7}


def sd3_image() -> Built:
    pipe = diffusers.StableDiffusion3Img2ImgPipeline(**parts("sd3"))
    return pipe, {"image": picture(), "strength": 0.7, **SIZES, **WORDS}


def flux_image() -> Built:
    pipe = diffusers.FluxImg2ImgPipeline(**parts("flux"))
    return pipe, {"image": picture(), "strength": 0.7, **SIZES, **WORDS}


def sd_inpaint() -> Built:
    pipe = diffusers.StableDiffusionInpaintPipeline(**parts("sd"), requires_safety_checker=False)
    return pipe, {"image": picture(), "mask_image": mask(), "strength": 0.8, **SIZES}


def sd_inpaint_channels() -> Built:
    """With a network that gets mask and image as additional channels."""
    unet = conditional(in_channels=9)
    pipe = diffusers.StableDiffusionInpaintPipeline(
        **parts("sd", unet=unet), requires_safety_checker=False
    )
    return randomize(pipe), {"image": picture(), "mask_image": mask(), **SIZES}


def sdxl_inpaint() -> Built:
    pipe = diffusers.StableDiffusionXLInpaintPipeline(**parts("sdxl"), add_watermarker=False)
    return pipe, {"image": picture(), "mask_image": mask(), "strength": 0.8, **SIZES}


def sd3_inpaint() -> Built:
    other = {"transformer": stable_diffusion_3(16).transformer, "vae": autoencoder(16, False)}
    pipe = diffusers.StableDiffusion3InpaintPipeline(**parts("sd3", **other))
    return randomize(pipe), {
        "image": picture(),
        "mask_image": mask(),
        "strength": 0.8,
        **SIZES,
        **WORDS,
    }


def flux_inpaint() -> Built:
    pipe = diffusers.FluxInpaintPipeline(**parts("flux"))
    return pipe, {"image": picture(), "mask_image": mask(), "strength": 0.8, **SIZES, **WORDS}


def flux_control() -> Built:
    other = parts("flux", transformer=flux(32).transformer)
    del other["image_encoder"], other["feature_extractor"]
    return randomize(diffusers.FluxControlPipeline(**other)), {
        "control_image": picture(),
        **SIZES,
        **WORDS,
    }


def flux_kontext() -> Built:
    pipe = diffusers.FluxKontextPipeline(**parts("flux"))
    return pipe, {"image": picture(), **SIZES, **WORDS, "max_area": 64, "_auto_resize": False}


def flux_fill() -> Built:
    """The network gets the masked image (16 channels) and the mask (4) after the latents."""
    other = parts("flux", transformer=flux(36).transformer)
    del other["image_encoder"], other["feature_extractor"]
    given = {"image": picture(), "mask_image": mask(), **SIZES, **WORDS}
    return randomize(diffusers.FluxFillPipeline(**other)), given


def cogvideo_image() -> Built:
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8,) * 4,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    scheduler = diffusers.DDPMScheduler(clip_sample=False)
    pipe = diffusers.CogVideoXImageToVideoPipeline(None, None, vae, cogvideo_network(8), scheduler)
    given = {"prompt_embeds": words(1), "negative_prompt_embeds": words(2), "prompt": None}
    sizes = {"num_frames": 9, "height": 16, "width": 16}
    return randomize(pipe), {**given, **sizes, "image": torch.rand(1, 3, 16, 16)}


def pix2pix() -> Built:
    unet = conditional(in_channels=8)
    pipe = diffusers.StableDiffusionInstructPix2PixPipeline(
        **parts("sd", unet=unet), requires_safety_checker=False
    )
    return randomize(pipe), {"image": picture()}


BUILDERS: dict[str, Callable[[], Built]] = {
    "sd-image": sd_image,
    "sdxl-image": sdxl_image,
    "sd3-image": sd3_image,
    "flux-image": flux_image,
    "sd-inpaint": sd_inpaint,
    "sd-inpaint-channels": sd_inpaint_channels,
    "sdxl-inpaint": sdxl_inpaint,
    "sd3-inpaint": sd3_inpaint,
    "flux-inpaint": flux_inpaint,
    "flux-control": flux_control,
    "flux-kontext": flux_kontext,
    "flux-fill": flux_fill,
    "pix2pix": pix2pix,
    "cogvideo-image": cogvideo_image,
}
