"""Convert public MAR checkpoints to this package's names, and back. Only names differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from mmspec.models.mar import MarForImageGeneration
from mmspec.models.public_weights import map_public_weights, parse_names, public_name

NAMES = parse_names(  # own pattern -> public name; the first match counts
    r"""
    class_table\.                           class_emb.
    no_class                                fake_latent
    embed\.                                 z_proj.
    embed_norm\.                            z_proj_ln.
    encoder_positions                       encoder_pos_embed_learned
    encoder_norm\.                          encoder_norm.
    bridge\.                                decoder_embed.
    mask_token                              mask_token
    decoder_positions                       decoder_pos_embed_learned
    decoder_norm\.                          decoder_norm.
    head_positions                          diffusion_pos_embed_learned
    (encoder|decoder)\.(\d+)\.(norm\d)\.    \1_blocks.\2.\3.
    (encoder|decoder)\.(\d+)\.(qkv|proj)\.  \1_blocks.\2.attn.\3.
    (encoder|decoder)\.(\d+)\.(fc\d)\.      \1_blocks.\2.mlp.\3.
    head\.time_in\.                         diffloss.net.time_embed.mlp.0.
    head\.time_out\.                        diffloss.net.time_embed.mlp.2.
    head\.condition\.                       diffloss.net.cond_embed.
    head\.input\.                           diffloss.net.input_proj.
    head\.blocks\.(\d+)\.norm\.             diffloss.net.res_blocks.\1.in_ln.
    head\.blocks\.(\d+)\.fc1\.              diffloss.net.res_blocks.\1.mlp.0.
    head\.blocks\.(\d+)\.fc2\.              diffloss.net.res_blocks.\1.mlp.2.
    head\.blocks\.(\d+)\.modulation\.       diffloss.net.res_blocks.\1.adaLN_modulation.1.
    head\.modulation\.                      diffloss.net.final_layer.adaLN_modulation.1.
    head\.output\.                          diffloss.net.final_layer.linear.
    """
)


def load_public(model: MarForImageGeneration, weights: str | Path) -> None:
    """Fill a model in place from public weights, converted to a safetensors file.

    Of a training checkpoint take the averaged weights ("model_ema"). Raises ValueError naming what
    is missing or of another shape.
    """
    model.load_state_dict(from_public(load_file(weights), model))


def from_public(public: Mapping[str, Tensor], model: MarForImageGeneration) -> dict[str, Tensor]:
    """Public weights under the model's names; what the model does not have stays out."""
    return map_public_weights(model.state_dict(), public, lambda name: public_name(name, NAMES))


def to_public(model: MarForImageGeneration) -> dict[str, Tensor]:
    """The model's weights as the public checkpoints name them."""
    return {public_name(name, NAMES): value for name, value in model.state_dict().items()}
