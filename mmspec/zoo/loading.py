"""Load checkpoints of the zoo the way a user loads their own, and never from a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.zoo.catalogue import info, path

if TYPE_CHECKING:
    import torch
    from diffusers import PixArtAlphaPipeline, PixArtTransformer2DModel
    from transformers import PreTrainedModel


def load(name: str, dtype: torch.dtype | None = None) -> Any:
    """A model in eval mode; in float32 unless told otherwise (the files hold float16).

    A diffusers pipeline for a diffusion target, and its denoiser alone for a drafter.
    """
    entry, folder = info(name), path(name)
    if entry.modality != "diffusion":
        return load_folder(folder, entry.sees == "pixels", dtype)
    if entry.kind == "target":
        return load_pipeline(folder, dtype)
    return load_denoiser(folder, dtype)


def load_folder(folder: Path, sees: bool, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model from any folder of the same form."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(
        folder, dtype=dtype or torch.float32, local_files_only=True
    )
    model.train(False)
    return model


def load_pipeline(folder: Path, dtype: torch.dtype | None = None) -> PixArtAlphaPipeline:
    """A text-to-image pipeline from any folder of the same form."""
    import torch
    from diffusers import PixArtAlphaPipeline

    load: Any = PixArtAlphaPipeline.from_pretrained
    pipeline: PixArtAlphaPipeline = load(
        folder, dtype=dtype or torch.float32, local_files_only=True
    )
    return pipeline


def load_denoiser(folder: Path, dtype: torch.dtype | None = None) -> PixArtTransformer2DModel:
    """A diffusion transformer from any folder of the same form."""
    import torch
    from diffusers import PixArtTransformer2DModel

    load: Any = PixArtTransformer2DModel.from_pretrained
    denoiser: PixArtTransformer2DModel = load(
        folder, dtype=dtype or torch.float32, local_files_only=True
    )
    denoiser.train(False)
    return denoiser


def processor(name: str) -> Any:
    """The processor of a vision-language model; the tokenizer of a text-only drafter."""
    from transformers import AutoProcessor, AutoTokenizer

    auto: Any = AutoProcessor if info(name).sees == "pixels" else AutoTokenizer
    return auto.from_pretrained(path(name), local_files_only=True)
