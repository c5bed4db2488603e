"""Load checkpoints of the zoo the way a user loads their own, and never from a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmspec.zoo.catalogue import info, path

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load(name: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model in eval mode; in float32 unless told otherwise (the files hold float16)."""
    return load_folder(path(name), info(name).sees == "pixels", dtype)


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


def processor(name: str) -> Any:
    """The processor of a vision-language model; the tokenizer of a text-only drafter."""
    from transformers import AutoProcessor, AutoTokenizer

    auto: Any = AutoProcessor if info(name).sees == "pixels" else AutoTokenizer
    return auto.from_pretrained(path(name), local_files_only=True)
