"""Public MAR checkpoints under this package's names, and back. Only names differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from mmspec.models.mar import MarForImageGeneration
from mmspec.models.public_weights import public_name, taken

NAMES = (  # ours -> theirs, the first that fits
    (r"class_table\.", "class_emb."),
    (r"no_class", "fake_latent"),
    (r"embed\.", "z_proj."),
    (r"embed_norm\.", "z_proj_ln."),
    (r"encoder_positions", "encoder_pos_embed_learned"),
    (r"encoder_norm\.", "encoder_norm."),
    (r"bridge\.", "decoder_embed."),
    (r"mask_token", "mask_token"),
    (r"decoder_positions", "decoder_pos_embed_learned"),
    (r"decoder_norm\.", "decoder_norm."),
    (r"head_positions", "diffusion_pos_embed_learned"),
    (r"(encoder|decoder)\.(\d+)\.(norm\d)\.", r"\1_blocks.\2.\3."),
    (r"(encoder|decoder)\.(\d+)\.(qkv|proj)\.", r"\1_blocks.\2.attn.\3."),
    (r"(encoder|decoder)\.(\d+)\.(fc\d)\.", r"\1_blocks.\2.mlp.\3."),
    (r"head\.time_in\.", "diffloss.net.time_embed.mlp.0."),
    (r"head\.time_out\.", "diffloss.net.time_embed.mlp.2."),
    (r"head\.condition\.", "diffloss.net.cond_embed."),
    (r"head\.input\.", "diffloss.net.input_proj."),
    (r"head\.blocks\.(\d+)\.norm\.", r"diffloss.net.res_blocks.\1.in_ln."),
    (r"head\.blocks\.(\d+)\.fc1\.", r"diffloss.net.res_blocks.\1.mlp.0."),
    (r"head\.blocks\.(\d+)\.fc2\.", r"diffloss.net.res_blocks.\1.mlp.2."),
    (r"head\.blocks\.(\d+)\.modulation\.", r"diffloss.net.res_blocks.\1.adaLN_modulation.1."),
    (r"head\.modulation\.", "diffloss.net.final_layer.adaLN_modulation.1."),
    (r"head\.output\.", "diffloss.net.final_layer.linear."),
)


def load_public(model: MarForImageGeneration, weights: str | Path) -> None:
    """Fill a model in place from public weights, converted to a safetensors file.

    Of a training checkpoint take the averaged weights ("model_ema"). Raises ValueError naming what
    is missing or of another shape.
    """
    model.load_state_dict(from_public(load_file(weights), model))


def from_public(public: Mapping[str, Tensor], model: MarForImageGeneration) -> dict[str, Tensor]:
    """Public weights under the model's names; what the model does not have stays out."""
    return taken(model.state_dict(), public, lambda name: public_name(name, NAMES))


def to_public(model: MarForImageGeneration) -> dict[str, Tensor]:
    """The model's weights as the public checkpoints name them."""
    return {public_name(name, NAMES): value for name, value in model.state_dict().items()}
