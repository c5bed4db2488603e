"""Vision towers of timm and the projector of Prismatic models (Karamcheti et al. 2024).

Patch features are those of the last block but one. Two towers read the same image, each with its
own normalisation: `pixel_values` (n, 6, H, W) hold three channels for each, and their features are
concatenated.
"""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.layers.layer_scale import LayerScale
from torch import Tensor, nn

from mmspec.models.prismatic_config import DINO_SIGLIP, PrismaticConfig


class PrismaticVisionBackbone(nn.Module):
    """One or two vision transformers of timm, without their heads."""

    def __init__(self, config: PrismaticConfig) -> None:
        super().__init__()
        self.size = (config.image_sizes or [])[0]
        self.featurizer = _tower(config, 0)
        self.fused_featurizer: nn.Module | None = None
        self.width: int = self.featurizer.embed_dim
        self.patches: int = self.featurizer.patch_embed.num_patches
        if config.use_fused_vision_backbone:
            second = _tower(config, 1)
            if second.patch_embed.num_patches != self.patches:
                raise ValueError(
                    f"the towers cut an image into {self.patches} and "
                    f"{second.patch_embed.num_patches} patches, which cannot be concatenated; give "
                    "them the same patch_size in timm_kwargs"
                )
            self.width += second.embed_dim
            self.fused_featurizer = second

    @property
    def channels(self) -> int:
        """Three for each tower."""
        return 3 if self.fused_featurizer is None else 6

    def forward(self, pixel_values: Tensor) -> Tensor:  # (n, C, H, W) -> (n, patches, width)
        """Features of images. Raises ValueError for wrong numbers of channels and sizes."""
        expected = (self.channels, self.size, self.size)
        if pixel_values.dim() != 4 or tuple(pixel_values.shape[1:]) != expected:
            raise ValueError(
                f"pixel_values have shape {tuple(pixel_values.shape)}, but this model reads "
                f"(images, {self.channels}, {self.size}, {self.size}); pass the output of "
                "PrismaticProcessor"
            )
        pixel_values = pixel_values.to(self.featurizer.patch_embed.proj.weight.dtype)
        features = _penultimate(self.featurizer, pixel_values[:, :3])
        if self.fused_featurizer is None:
            return features
        return torch.cat((features, _penultimate(self.fused_featurizer, pixel_values[:, 3:])), -1)


class PrismaticProjector(nn.Module):
    """Projects features (n, P, width) to (n, P, D); with a wide first layer for two towers."""

    def __init__(self, width: int, hidden_size: int, is_fused: bool) -> None:
        super().__init__()
        first = 4 * width if is_fused else hidden_size
        self.fc1 = nn.Linear(width, first)
        self.fc2 = nn.Linear(first, hidden_size)
        self.fc3 = nn.Linear(hidden_size, hidden_size) if is_fused else None

    def forward(self, features: Tensor) -> Tensor:
        embeds: Tensor = self.fc2(nn.functional.gelu(self.fc1(features)))
        return embeds if self.fc3 is None else self.fc3(nn.functional.gelu(embeds))


class PrismaticLayerScale(nn.Module):
    """LayerScale under the name of public checkpoints: `scale_factor`."""

    def __init__(self, scale: LayerScale) -> None:
        super().__init__()
        self.initial = scale.init_values
        self.scale_factor = nn.Parameter(scale.gamma.detach().clone())

    def forward(self, states: Tensor) -> Tensor:
        return states * self.scale_factor


def _tower(config: PrismaticConfig, at: int) -> Any:
    """Make a tower of timm, with the unused last block and pooling, which published weights have.

    Raises ValueError for unknown names and towers that are not vision transformers.
    """
    name = (config.timm_model_ids or [])[at]
    own = {
        "img_size": (config.image_sizes or [])[at],
        "act_layer": (config.timm_override_act_layers or [])[at],
        **(config.timm_kwargs or [])[at],
    }
    try:
        tower: Any = timm.create_model(name, pretrained=False, num_classes=0, **own)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"timm {timm.__version__} cannot make tower {name!r} with {own} ({error}); check "
            "timm_model_ids and timm_kwargs"
        ) from error
    if type(tower).__name__ != "VisionTransformer" or len(tower.blocks) < 2:
        raise ValueError(
            f"timm's {name!r} is a {type(tower).__name__}, but a tower is a VisionTransformer of "
            f"two or more blocks; choose one such as {DINO_SIGLIP[0]}"
        )
    for name, module in list(tower.named_modules()):
        if isinstance(module, LayerScale):
            tower.set_submodule(name, PrismaticLayerScale(module))
    return tower


def _penultimate(tower: Any, pixels: Tensor) -> Tensor:  # (n, 3, H, W) -> (n, patches, width)
    """Patch features of the last block but one, without class and register tokens."""
    (features,) = tower.forward_intermediates(
        pixels,
        indices=[len(tower.blocks) - 2],
        output_fmt="NLC",
        intermediates_only=True,
        stop_early=True,
    )
    found: Tensor = features
    return found
