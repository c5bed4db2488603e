"""What `mmspec.accelerate` returns for masked autoregressive models of continuous tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor

from mmspec.accelerated import Accelerated
from mmspec.stats import Stats


@dataclass(frozen=True)
class LatentImages:
    """What `generate_images` returns; tokens in `stats` are autoregressive steps."""

    latents: Tensor  # (B, channels, h, w), as the model has them
    images: list[Image.Image] | None  # where a VAE was given
    stats: Stats


class AcceleratedMarModel(Accelerated):
    """A model that generates images as continuous tokens (MAR)."""

    calls: ClassVar[tuple[str, ...]] = ("generate_images",)

    def generate_images(self, *args: Any, **arguments: Any) -> LatentImages:
        """Generate one image per class.

        Args:
            class_labels: A class number, or a list in which None is the unconditional class; or
                `prompt`, a class name of the model's configuration or several.
            steps, guidance, guidance_schedule, temperature, head_steps, last_noise: Settings of the
                sampler, see `mmspec.targets.continuous.patches.PatchSettings`.
            vae: The autoencoder of diffusers that decodes latents; without it there are latents
                only.
            seed, row_ids, on_round: See `mmspec.Accelerated`.

        Returns:
            `LatentImages`: `latents` (B, C, H, W), `images` (PIL, or None without `vae`), `stats`.

        Raises:
            ValueError: An unknown class or argument, more steps than tokens, an exact recipe with a
                sampler that adds no noise in its last step.

        Example:
            >>> fast = mmspec.accelerate("zoo:mar")
            >>> vae = mmspec.zoo.vae("mar")
            >>> fast.generate_images(class_labels=[3, 8], steps=36, last_noise=True, vae=vae).images
        """
        return self._run("generate_images", args, arguments)  # type: ignore[no-any-return]
