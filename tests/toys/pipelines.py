"""Tiny, randomly initialised diffusers pipelines of real classes. No downloads.

`pipeline(name)` builds in milliseconds, `asked(name, pictures)` are arguments of its call. Weights
are wide enough (`GAIN`) that predictions depend on state, step and condition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from mmspec.modalities.diffusion import tiny_text
from mmspec.modalities.diffusion.tiny_text import t5_tokenizer

GAIN = 1.5
TEXT = 32  # width of the text encoders
PROMPTS = ("a red square", "two blue dots", "the letter k on green")
LONGEST = 16  # tokens of a prompt
UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}


def pipeline(name: str, seed: int = 0) -> Any:
    """A float32 pipeline with a stochastic scheduler if its class has one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = BUILDERS[name]()
    return randomize(pipe, seed)


def randomize(pipe: Any, seed: int = 0) -> Any:
    """The pipeline with random weights of stable activations, without progress bar."""
    generator = torch.Generator().manual_seed(seed)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            _randomise(part.eval(), generator)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def build_request(name: str, pictures: int = 1) -> dict[str, Any]:
    """Arguments of a call for several images."""
    if name in ("ddpm", "ddim", "learned"):
        return {"batch_size": pictures}
    if name == "dit":
        return {"class_labels": [3, 7, 1][:pictures]}
    prompts = {"prompt": list(PROMPTS[:pictures])}
    sizes = {"height": 8, "width": 8, "max_sequence_length": LONGEST}
    if name in ("sd3", "flux"):
        return {**prompts, **sizes}
    if name == "pixart":
        return {**prompts, **sizes, "use_resolution_binning": False, "clean_caption": False}
    if name == "animatediff":
        return {**prompts, "num_frames": 3, "height": 8, "width": 8}
    if name == "ltx":
        return {**prompts, **sizes, "height": 32, "width": 32, "num_frames": 9}
    return prompts


def ddpm(out_channels: int = 3) -> Any:
    unet = diffusers.UNet2DModel(
        in_channels=3,
        out_channels=out_channels,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        **UNET,
    )
    return diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())


def learned_variance() -> Any:
    """A pipeline whose network also predicts a variance."""
    pipe = ddpm(6)
    pipe.scheduler = diffusers.DDPMScheduler(variance_type="learned_range")
    return pipe


def ddim() -> Any:
    return diffusers.DDIMPipeline(ddpm().unet, diffusers.DDIMScheduler())


def dit() -> Any:
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )
    return diffusers.DiTPipeline(transformer, autoencoder(4), diffusers.DDPMScheduler())


def stable_diffusion() -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=autoencoder(4),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        unet=conditional(),
        scheduler=diffusers.DDPMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def perturbed_attention() -> Any:
    """Stable Diffusion under perturbed-attention guidance."""
    return diffusers.StableDiffusionPAGPipeline(
        **stable_diffusion().components, requires_safety_checker=False, pag_applied_layers=["mid"]
    )


def animatediff() -> Any:
    parts = stable_diffusion().components
    motion = diffusers.MotionAdapter(
        block_out_channels=UNET["block_out_channels"],
        motion_layers_per_block=1,
        motion_norm_num_groups=4,
        motion_num_attention_heads=2,
    )
    names = ("vae", "text_encoder", "tokenizer", "unet", "scheduler")
    return diffusers.AnimateDiffPipeline(
        **{name: parts[name] for name in names}, motion_adapter=motion
    )


def stable_diffusion_xl() -> Any:
    unet = conditional(
        cross_attention_dim=2 * TEXT,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + TEXT,
        use_linear_projection=True,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=autoencoder(4),
        text_encoder=clip(),
        text_encoder_2=clip(projected=True),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=unet,
        scheduler=diffusers.EulerAncestralDiscreteScheduler(),
        add_watermarker=False,
    )


def stable_diffusion_3(channels: int = 4) -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=channels,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=TEXT,
        caption_projection_dim=32,
        pooled_projection_dim=2 * TEXT,
        out_channels=channels,
        pos_embed_max_size=8,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
        vae=autoencoder(4, quantised=False),
        text_encoder=clip(projected=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(projected=True),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5(),
        tokenizer_3=t5_tokenizer(),
    )


def flux(in_channels: int = 16) -> Any:
    """FLUX with `in_channels` input channels, the first 16 of them latents."""
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=in_channels,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
        vae=autoencoder(4, quantised=False),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
    )


def pixart() -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=TEXT,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
    )
    return diffusers.PixArtAlphaPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5(),
        vae=autoencoder(4),
        transformer=transformer,
        scheduler=diffusers.DDPMScheduler(clip_sample=False),
    )


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=1,
        caption_channels=TEXT,
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_residual=(False, False, False, False),
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
        vae=vae,
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
    )


def autoencoder(channels: int, quantised: bool = True) -> Any:
    """An autoencoder whose latents have half the side of the image, which is faster."""
    return diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=channels,
        block_out_channels=(4,),
        norm_num_groups=2,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        sample_size=8,
        shift_factor=0.1,
        use_quant_conv=quantised,
        use_post_quant_conv=quantised,
    )


def conditional(**changes: Any) -> Any:
    """A text-conditional UNet."""
    settings: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 2,
        "cross_attention_dim": TEXT,
        **UNET,
        **changes,
    }
    return diffusers.UNet2DConditionModel(**settings)


def clip(projected: bool = False) -> Any:
    kind = "CLIPTextModelWithProjection" if projected else "CLIPTextModel"
    return tiny_text.clip(kind, len(clip_tokenizer()), LONGEST)


def clip_tokenizer() -> Any:
    return tiny_text.clip_tokenizer(LONGEST)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=TEXT, d_kv=8, d_ff=37, num_layers=1, num_heads=2
    )
    return transformers.T5EncoderModel(config)


def _randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Random weights with stable activations, also for zero-initialised gates and outputs."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() > 1:
                scale = GAIN / weight[0].numel() ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            elif name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


BUILDERS: dict[str, Callable[[], Any]] = {
    "ddpm": ddpm,
    "learned": learned_variance,
    "ddim": ddim,
    "dit": dit,
    "sd": stable_diffusion,
    "pag": perturbed_attention,
    "animatediff": animatediff,
    "sdxl": stable_diffusion_xl,
    "sd3": stable_diffusion_3,
    "flux": flux,
    "pixart": pixart,
    "ltx": ltx,
}
