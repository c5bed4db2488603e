"""Load checkpoints of the zoo the way a user loads their own, and never from a network.

How is up to the module that `Entry.loader` names: it has `load(entry, folder, dtype)` and
`processor(entry, folder)`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.modality import Entry
from mmspec.zoo.catalogue import info, names, path

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderTiny
    from transformers import PreTrainedModel


def load(name: str, dtype: torch.dtype | None = None) -> Any:
    """A model in eval mode; in float32 unless told otherwise (the files hold float16).

    A diffusers pipeline for a diffusion target, and its denoiser alone for a drafter; a
    `FeatureHead` for a drafter that sees the states of its target; MAR as the package has it.
    """
    entry = info(name)
    return _loader(entry).load(entry, path(name), dtype)


def processor(name: str) -> Any:
    """The processor of a model that sees or draws; the tokenizer of a text-only drafter.

    A feature head has that of its target. Raises ValueError for models that have none.
    """
    entry = info(name)
    return _loader(entry).processor(entry, path(name))


def vae(name: str, dtype: torch.dtype | None = None) -> AutoencoderTiny:
    """What makes pixels of the latents that a model draws; a drafter has that of its target.

    Raises ValueError for a checkpoint without one.
    """
    entry = info(name)
    folder = path(entry.target or entry.name)
    if not (folder / "vae").exists():
        known = ", ".join(one for one in names() if (path(one) / "vae").exists())
        raise ValueError(f"{entry.name} has no autoencoder of its own; choose one of: {known}")
    return load_vae(folder, dtype)


def load_folder(folder: Path, sees: bool, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model of transformers; `sees`: of a class that it files under images and text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model: PreTrainedModel = pretrained(
        AutoModelForImageTextToText if sees else AutoModelForCausalLM, folder, dtype
    )
    return model


def load_processor(folder: Path, sees: bool) -> Any:
    """The processor of a model of transformers; its tokenizer where it has no other.

    Not by `AutoTokenizer`: for some model types that ignores what the folder says, and loses words.
    """
    from transformers import AutoProcessor, PreTrainedTokenizerFast

    kind: Any = AutoProcessor if sees else PreTrainedTokenizerFast
    return kind.from_pretrained(folder, local_files_only=True)


def load_vae(folder: Path, dtype: torch.dtype | None = None) -> AutoencoderTiny:
    """The autoencoder beside a model or in a pipeline."""
    from diffusers import AutoencoderTiny

    coder: AutoencoderTiny = pretrained(AutoencoderTiny, folder / "vae", dtype)
    return coder


def pretrained(kind: Any, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A model of a class of transformers, diffusers or our own, in eval mode and in float32."""
    import torch

    model = kind.from_pretrained(folder, dtype=dtype or torch.float32, local_files_only=True)
    return model.train(False)


def _loader(entry: Entry) -> Any:
    return import_module(entry.loader)
