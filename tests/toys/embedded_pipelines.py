"""Tiny diffusers pipelines called with embeddings, without text encoder and autoencoder.

`embedded(name)` is the pipeline, and the arguments of a call for one picture's latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor

from tests.toys.pipelines import randomize

Built = tuple[Any, dict[str, Any]]
_WORDS, _WIDTH = 5, 32


def build_pipeline(name: str) -> Built:
    """A float32 pipeline with a stochastic flow, and the arguments of a call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, given = BUILDERS[name]()
    pipe = randomize(pipe)
    return pipe, {"output_type": "latent", "height": 16, "width": 16, **given}


def flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)


def words(seed: int, width: int = _WIDTH) -> Tensor:  # (1, words, width)
    return torch.randn(1, _WORDS, width, generator=torch.Generator().manual_seed(seed))


def mask() -> Tensor:  # (1, words)
    return torch.ones(1, _WORDS, dtype=torch.bool)


def qwen_image() -> Built:
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    given = {
        "prompt_embeds": words(1),
        "prompt_embeds_mask": mask(),
        "negative_prompt_embeds": words(2),
        "negative_prompt_embeds_mask": mask(),
    }
    return diffusers.QwenImagePipeline(flow(), None, None, None, transformer), given


def hunyuan_image() -> Built:
    """With the guider of the released model, starting at step 2."""
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=_WIDTH,
        text_embed_2_dim=_WIDTH,
        rope_axes_dim=(8, 8),
    )
    guider = diffusers.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2)
    pipe = diffusers.HunyuanImagePipeline(
        flow(), None, None, None, None, None, transformer, guider=guider
    )
    given: dict[str, Any] = {"height": 64, "width": 64}
    for place, name in enumerate(("prompt_embeds", "negative_prompt_embeds")):
        for end in ("", "_2"):
            given[name + end] = words(place)
            given[f"{name}_mask{end}"] = mask()
    return pipe, given


def prx_pixel() -> Built:
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=3,
        patch_size=2,
        context_in_dim=_WIDTH,
        hidden_size=32,
        num_heads=2,
        depth=1,
        axes_dim=[8, 8],
    )
    pipe = diffusers.PRXPixelPipeline(transformer, flow(), None, None)
    given = {"prompt_embeds": words(1), "negative_prompt_embeds": words(2)}
    masks = {"prompt_attention_mask": mask(), "negative_prompt_attention_mask": mask()}
    return pipe, {**given, **masks, "use_resolution_binning": False}


def z_image() -> Built:
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[64, 32, 32],
    )
    pipe = diffusers.ZImagePipeline(flow(), None, None, None, transformer)
    given = {"prompt_embeds": [words(1)[0]], "negative_prompt_embeds": [words(2)[0]]}
    return pipe, given


def lumina() -> Built:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=4,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(64, 32, 32),
        cap_feat_dim=_WIDTH,
    )
    pipe = diffusers.Lumina2Pipeline(transformer, flow(), None, None, None)
    given = {"prompt_embeds": words(1), "negative_prompt_embeds": words(2)}
    masks = {"prompt_attention_mask": mask(), "negative_prompt_attention_mask": mask()}
    return pipe, {**given, **masks}


def cogvideo_network(in_channels: int = 4) -> Any:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=_WIDTH,
        num_layers=1,
        sample_width=2,
        sample_height=2,
        sample_frames=9,
        max_text_seq_length=_WORDS,
    )


def cogvideo() -> Built:
    scheduler = diffusers.DDPMScheduler(clip_sample=False)
    pipe = diffusers.CogVideoXPipeline(None, None, None, cogvideo_network(), scheduler)
    given = {"prompt_embeds": words(1), "negative_prompt_embeds": words(2)}
    return pipe, {**given, "num_frames": 9}


def wan_expert(in_channels: int = 4, **more: Any) -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=4,
        text_dim=_WIDTH,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        **more,
    )


def wan() -> Built:
    """Two experts, the second for the last steps (Wan 2.2)."""
    pipe = diffusers.WanPipeline(None, None, None, flow(), wan_expert(), wan_expert(), 0.6)
    given = {"prompt_embeds": words(1), "negative_prompt_embeds": words(2)}
    return pipe, {**given, "num_frames": 5}


def wan_of_one() -> Built:
    """One network, and the released sampler with flow sigmas, made stochastic (Wan 2.1)."""
    shipped = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    scheduler = diffusers.DPMSolverMultistepScheduler.from_config(
        shipped.config, algorithm_type="sde-dpmsolver++"
    )
    pipe = diffusers.WanPipeline(None, None, None, scheduler, wan_expert())
    given = {"prompt_embeds": words(1), "negative_prompt_embeds": words(2)}
    return pipe, {**given, "num_frames": 5}


def wan_of_tokens() -> Built:
    """One timestep per token (Wan 2.2, 5 B)."""
    pipe = diffusers.WanPipeline(None, None, None, flow(), wan_expert(), expand_timesteps=True)
    given = {"prompt_embeds": words(1), "negative_prompt_embeds": words(2)}
    return pipe, {**given, "num_frames": 5}


def hunyuan_video(kind: Any = diffusers.HunyuanVideo15Pipeline, *more: Any) -> Built:
    """With classifier-free guidance for a part of the steps."""
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=_WIDTH,
        text_embed_2_dim=_WIDTH,
        image_embed_dim=12,
        rope_axes_dim=(4, 6, 6),
        target_size=16,
        task_type="t2v" if kind is diffusers.HunyuanVideo15Pipeline else "i2v",
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    guider = diffusers.ClassifierFreeGuidance(guidance_scale=4.0, stop=0.5)
    pipe = kind(None, None, transformer, vae, flow(), None, None, guider, *more)
    given: dict[str, Any] = {"num_frames": 5}
    for place, name in enumerate(("prompt_embeds", "negative_prompt_embeds")):
        for end in ("", "_2"):
            given[name + end] = words(place)
            given[f"{name}_mask{end}"] = mask()
    return pipe, given


def hidream() -> Built:
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[_WIDTH, _WIDTH],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=[0, 1],
    )
    pipe = diffusers.HiDreamImagePipeline(flow(), *(None,) * 9, transformer)
    given: dict[str, Any] = {}
    for place, end in enumerate(("", "negative_")):
        given[f"{end}prompt_embeds_t5"] = words(place)
        given[f"{end}prompt_embeds_llama3"] = torch.stack([words(3 + place)] * 2)
        given[f"{end}pooled_prompt_embeds"] = words(5 + place, 64)[:, 0]
    return pipe, given


BUILDERS: dict[str, Callable[[], Built]] = {
    "qwen-image": qwen_image,
    "hunyuan-image": hunyuan_image,
    "prx-pixel": prx_pixel,
    "z-image": z_image,
    "lumina-2": lumina,
    "cogvideo": cogvideo,
    "wan-2.1": wan_of_one,
    "wan-2.2": wan,
    "wan-2.2-tokens": wan_of_tokens,
    "hunyuan-video-1.5": hunyuan_video,
    "hidream": hidream,
}
