"""Load checkpoints of the zoo the way a user loads their own, and never from a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.zoo.catalogue import Entry, info, path

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderTiny, PixArtAlphaPipeline, PixArtTransformer2DModel
    from transformers import PreTrainedModel

    from mmspec.models.heads.feature_head import FeatureHead
    from mmspec.models.mar import MarForImageGeneration

_MAR = ("mar", "mar-drafter")  # of the image models, those of continuous tokens


def load(name: str, dtype: torch.dtype | None = None) -> Any:
    """A model in eval mode; in float32 unless told otherwise (the files hold float16).

    A diffusers pipeline for a diffusion target, and its denoiser alone for a drafter; a
    `FeatureHead` for a drafter that sees the states of its target; MAR as the package has it.
    """
    entry, folder = info(name), path(name)
    if entry.sees == "target-states":
        return load_feature_head(folder, dtype)
    if entry.name in _MAR:
        return load_mar(folder, dtype)
    if entry.modality != "diffusion":
        return load_folder(folder, _is_multimodal(entry), dtype)
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


def load_feature_head(folder: Path, dtype: torch.dtype | None = None) -> FeatureHead:
    """A feature head from any folder of the same form."""
    import torch

    from mmspec.models.heads.feature_head import load_head

    head = load_head(folder)
    cast: Any = head.to
    cast(dtype or torch.float32)
    return head


def load_mar(folder: Path, dtype: torch.dtype | None = None) -> MarForImageGeneration:
    """A model of continuous tokens from any folder of the same form."""
    import torch

    from mmspec.models.mar import MarForImageGeneration

    load: Any = MarForImageGeneration.from_pretrained
    model: MarForImageGeneration = load(folder, dtype=dtype or torch.float32, local_files_only=True)
    model.train(False)
    return model


def vae(name: str, dtype: torch.dtype | None = None) -> AutoencoderTiny:
    """What makes pixels of the latents that a model of continuous tokens draws.

    Raises ValueError for a checkpoint without one.
    """
    entry = info(name)
    folder = path(entry.target or entry.name)
    if not (folder / "vae").exists():
        raise ValueError(f"{entry.name} has no autoencoder of its own; mar has one")
    return load_vae(folder, dtype)


def load_vae(folder: Path, dtype: torch.dtype | None = None) -> AutoencoderTiny:
    """The autoencoder beside a model or in a pipeline."""
    import torch
    from diffusers import AutoencoderTiny

    load: Any = AutoencoderTiny.from_pretrained
    coder: AutoencoderTiny = load(
        folder / "vae", torch_dtype=dtype or torch.float32, local_files_only=True
    )
    coder.train(False)
    return coder


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
    """The processor of a model that sees or draws; the tokenizer of a text-only drafter.

    A feature head has that of its target. Raises ValueError for models that read no words.
    """
    from transformers import AutoProcessor, AutoTokenizer

    entry = info(name)
    if entry.name in _MAR:
        raise ValueError(
            f"{entry.name} draws classes and reads no words, so it has no processor; give classes "
            'to generate_images(), and vae=mmspec.zoo.vae("mar") for pixels'
        )
    auto: Any = AutoProcessor if _is_multimodal(entry) else AutoTokenizer
    holder = entry.target if entry.sees == "target-states" else entry.name
    assert holder is not None
    return auto.from_pretrained(path(holder), local_files_only=True)


def _is_multimodal(entry: Entry) -> bool:
    """Whether a checkpoint is of a class that transformers files under images and text."""
    return entry.sees == "pixels" or entry.modality == "image"
