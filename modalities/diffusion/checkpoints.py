"""Load the bundled pipelines, and denoisers that are used with its other parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderTiny, PixArtTransformer2DModel

from mmspec.modality import Entry
from mmspec.zoo.catalogue import load_pretrained


def _own_size_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of PixArt whose images have the network's own size and whose captions are as given."""
    defaults = {"use_resolution_binning": False, "clean_caption": False}
    form = signature(call)
    parameters = [
        one.replace(default=defaults.get(name, one.default))
        for name, one in form.parameters.items()
    ]

    @wraps(call)
    def run(self: Any, *args: Any, **arguments: Any) -> Any:
        return call(self, *args, **defaults | arguments)

    run.__signature__ = form.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


class PixArtAlphaPipeline(diffusers.PixArtAlphaPipeline):  # type: ignore[misc]
    """PixArt with the bundled parts: a tiny autoencoder, and images of a single small size.

    It has the name of its base, so that diffusers loads what it saves.
    """

    def __init__(
        self, tokenizer: Any, text_encoder: Any, vae: AutoencoderTiny, transformer: Any,
        scheduler: Any,
    ) -> None:  # fmt: skip
        super().__init__(tokenizer, text_encoder, vae, transformer, scheduler)

    __call__ = _own_size_call(diffusers.PixArtAlphaPipeline.__call__)


class StableDiffusionPipeline(diffusers.StableDiffusionPipeline):  # type: ignore[misc]
    """Stable Diffusion with a tiny autoencoder and without a filter of its images.

    It has the name of its base, so that diffusers loads what it saves.
    """

    def __init__(
        self, vae: AutoencoderTiny, text_encoder: Any, tokenizer: Any, unet: Any, scheduler: Any,
        safety_checker: Any = None, feature_extractor: Any = None, image_encoder: Any = None,
        requires_safety_checker: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            vae, text_encoder, tokenizer, unet, scheduler, safety_checker, feature_extractor,
            image_encoder, requires_safety_checker,
        )  # fmt: skip


_PIPELINES: dict[str, Any] = {
    kind.__name__: kind for kind in (PixArtAlphaPipeline, StableDiffusionPipeline)
}


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A pipeline for a target, a denoiser for a draft model."""
    if entry.target is not None:
        return load_pretrained(PixArtTransformer2DModel, folder, dtype)
    kind = _PIPELINES[diffusers.DiffusionPipeline.load_config(folder)["_class_name"]]
    return kind.from_pretrained(folder, dtype=dtype or torch.float32, local_files_only=True)


def processor(entry: Entry, folder: Path) -> Any:
    """Raises ValueError: a pipeline encodes its prompts itself."""
    raise ValueError(
        f"{entry.name} has no processor: a pipeline encodes its prompts itself; for the tokenizer "
        f'use mmspec.zoo.load("{entry.target or entry.name}").tokenizer'
    )
