"""Small networks and autoencoders of any class of diffusers, made from a constructor's defaults.

Widths, heads and layers are parameters with a limited set of names; each known name gets a small
value, so that widths match. `CHANGES` has what a class needs in addition.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from diffusers.pipelines import ltx2, stable_diffusion
from torch import nn

from mmspec.modalities.diffusion.tiny_text import WIDTH

GAIN = 1.0  # of the weights, at which predictions depend on state, step and condition
HEADS, HEAD, LAYERS = 2, 16, 2
BLOCKS = (8, 16, 16, 16, 16, 16)  # channels of an autoencoder's blocks, at most

# names (whole, by regular expression) -> value; the first that fits
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"(\w+_)?num(_cross)?_(attention|key_value|kv)_heads|(\w+_)?num_(kv_)?heads|n_(kv_)?heads", 2),
    (r"(\w+_)?(attention_)?head_dim", HEAD),
    (
        r"num(_single|_refiner|_mmdit|_single_dit|_text|_visual|_hidden|_mid)?_(layers|blocks)"
        r"|n_(refiner_)?layers|mmdit_layers|num_layerwise_text_blocks|num_refiner_text_blocks|depth",
        LAYERS,
    ),
    (
        r"joint_attention_dim|(\w+_)?text_(embed_|hidden_|encoder_)?dim|caption_channels|text_in_dim"
        r"|cap_feat_dim|in_text_dim2?|context_in_dim|encoder_hid_dim|text_embed_2_dim"
        r"|encoder_hidden_states_channels|(video|audio)_hidden_dim|pooled_projection_dim"
        r"|cross_attention_dim(_t5)?",
        WIDTH,
    ),
    (r"hidden_size|dim|model_dim|caption_projection_dim", HEADS * HEAD),
    (r"(ffn|ff)_(dim|hidden_size)|(\w+_)?intermediate_(size|dim)|approximator_hidden_dim", 48),
    (r"(timestep|time)_embed_dim|time_dim|condition_dim|adaln_(lora_)?dim|freq_dim", 32),
    (r"axes_dims?(_rope)?|rope_(axes_)?dims?", (4, 6, 6)),
    (r"pos_embed_max_size", 32),
    (r"norm_num_groups|groups|motion_norm_num_groups", 4),
    (r"(motion_)?layers_per_block|num_res_blocks|motion_layers_per_block", 1),
    (r"base_dim|base_channels|decoder_base_dim", 4),
)


def network(kind: str, **changes: Any) -> Any:
    """A small module of a class of diffusers, by name. Raises ValueError for unknown classes."""
    made = _find_class(kind)
    if made is None:
        raise ValueError(f"diffusers has no {kind}")
    parameters = inspect.signature(made.__init__).parameters
    given = {**CHANGES.get(kind, {}), **changes}
    for name, parameter in parameters.items():
        if name != "self" and name not in given and parameter.kind is not parameter.VAR_KEYWORD:
            value = _shrink(name, parameter.default)
            if value is not parameter.default:
                given[name] = value
    return made(**given)


def is_network(kind: str) -> bool:
    """Whether a component's class is one of diffusers."""
    return _find_class(kind) is not None


def _find_class(kind: str) -> Any:
    homes: tuple[Any, ...] = (diffusers, ltx2, stable_diffusion)
    return next((getattr(home, kind) for home in homes if hasattr(home, kind)), None)


def _shrink(name: str, default: Any) -> Any:
    """A small value of a parameter by its name; its default where the name is not known."""
    if default is None:
        return default
    if name.endswith("block_out_channels") and isinstance(default, tuple | list):
        return type(default)(BLOCKS[: len(default)])
    for pattern, value in _SIZES:
        if re.fullmatch(pattern, name):
            if isinstance(value, int) and isinstance(default, tuple | list):
                return type(default)(value for _ in default)
            return value
    return default


def randomize(part: Any, generator: torch.Generator) -> None:
    """Random weights with stable activations, also for zero-initialised gates and outputs."""
    with torch.no_grad():
        for name, weight in part.named_parameters():
            if weight.dim() > 1 and weight.numel():
                scale = GAIN / weight[0].numel() ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            elif name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


def randomize_all(parts: Mapping[str, Any], seed: int = 0) -> None:
    """Randomise all modules of a pipeline with one stream of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    for part in parts.values():
        if isinstance(part, nn.Module):
            randomize(part.eval(), generator)


UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 2,
    "num_attention_heads": None,
}
PACKED: dict[str, Any] = {"in_channels": 16, "axes_dims_rope": (4, 6, 6)}
CHANGES: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": UNET,
    "UNetMotionModel": UNET,
    "Kandinsky3UNet": {"block_out_channels": (32, 64, 128, 256), "attention_head_dim": 8},
    "LTX2TextConnectors": {
        "caption_channels": WIDTH,
        "text_proj_in_factor": 5,
        "video_connector_num_learnable_registers": 8,
        "audio_connector_num_learnable_registers": 8,
    },
    "LTX2Vocoder": {"hidden_channels": 64},
    "LTX2VideoTransformer3DModel": {"cross_attention_dim": 32, "audio_cross_attention_dim": 32},
    "NucleusMoEImageTransformer2DModel": {
        "dense_moe_strategy": "leave_first_block_dense",
        "num_experts": 4,
        "moe_intermediate_dim": 16,
    },
    "UNet3DConditionModel": {
        **UNET,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "attention_head_dim": 4,
    },
    "MotionAdapter": {"block_out_channels": (8, 16), "motion_num_attention_heads": 2},
    "AllegroTransformer3DModel": {"sample_height": 8, "sample_width": 8, "sample_frames": 3},
    "AnyFlowFARTransformer3DModel": {"chunk_partition": (1, 2)},
    "AuraFlowTransformer2DModel": {"sample_size": 8},
    "CogVideoXTransformer3DModel": {
        "sample_height": 8,
        "sample_width": 8,
        "sample_frames": 9,
        "max_text_seq_length": 64,
    },
    "CogView3PlusTransformer2DModel": {"sample_size": 8},
    "CogView4Transformer2DModel": {"sample_size": 8, "rope_axes_dim": (8, 8)},
    "CosmosTransformer3DModel": {"max_size": (8, 16, 16)},
    "DreamLiteUNetModel": {
        "block_out_channels": (16, 32, 32),
        "attention_head_dim": 2,
    },
    "EasyAnimateTransformer3DModel": {
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "sample_width": 8,
        "sample_height": 8,
    },
    "HunyuanDiT2DModel": {
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": 8,
        "hidden_size": 32,
        "text_len": 77,
        "text_len_t5": 256,
    },
    "HunyuanVideo15Transformer3DModel": {"task_type": "t2v"},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 4,
        "caption_channels": [WIDTH, WIDTH],
        "text_emb_dim": 64,
        "num_activated_experts": 2,
        "axes_dims_rope": (8, 4, 4),
        "max_resolution": (32, 32),
        "llama_layers": [0, 1],
    },
    "Flux2Transformer2DModel": {"joint_attention_dim": 3 * WIDTH, "axes_dims_rope": (4, 4, 4, 4)},
    "HunyuanImageTransformer2DModel": {
        "in_channels": 64,
        "out_channels": 64,
        "rope_axes_dim": (8, 8),
    },
    "AutoencoderKLLTX2Audio": {"base_channels": 128, "ch_mult": (1, 1, 1)},
    "LatteTransformer3DModel": {
        "in_channels": 4,
        "out_channels": 8,
        "patch_size": 2,
        "cross_attention_dim": 32,
        "caption_channels": WIDTH,
        "sample_size": 8,
        "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "attention_bias": True,
        "activation_fn": "gelu-approximate",
        "video_length": 16,
    },
    "PixArtTransformer2DModel": {
        "sample_size": 8,
        "cross_attention_dim": 32,
        "caption_channels": 32,
    },
    "LuminaNextDiT2DModel": {"sample_size": 8, "multiple_of": 8, "num_kv_heads": 2},
    "AutoencoderKLMochi": {
        "encoder_block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (32, 32, 32, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
    },
    "Lumina2Transformer2DModel": {"sample_size": 8, "multiple_of": 8},
    "MotifVideoTransformer3DModel": {"num_decoder_layers": 0},
    "OmniGenTransformer2DModel": {
        "vocab_size": 160,
        "pad_token_id": 0,
        "pos_embed_max_size": 32,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
    },
    "PRXTransformer2DModel": {"axes_dim": (8, 8)},
    "SanaTransformer2DModel": {"sample_size": 2},
    "StableCascadeUNet": {
        "block_out_channels": (16, 16),
        "num_attention_heads": (2, 2),
        "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1),
        "conditioning_dim": 32,
        "clip_text_pooled_in_channels": WIDTH,
    },
    "WanVACETransformer3DModel": {"vace_layers": [0]},
    "Ideogram4Transformer2DModel": {"mrope_section": (4, 2, 2)},
    "AutoencoderKL": {
        "block_out_channels": (4, 4, 4, 4),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "shift_factor": 0.1,
        "norm_num_groups": 2,
    },
    "VQModel": {"block_out_channels": (8,), "latent_channels": 4},
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 64,
        "block_out_channels": (32, 32, 32, 64, 128, 128),
        "layers_per_block": 1,
        "spatial_compression_ratio": 32,
        "sample_size": 64,
    },
}
