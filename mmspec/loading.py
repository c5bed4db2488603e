"""Models from folders.

Weights load from safetensors only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mmspec.models.heads.feature_head import FeatureHeadConfig, load_head


def load_model(source: str | Path, dtype: torch.dtype | str = "auto", **arguments: Any) -> Any:
    """Load a causal or vision-language model from a folder, a hub name, or "zoo:NAME".

    A folder of a feature head gives a `mmspec.models.heads.feature_head.FeatureHead`.
    Raises ValueError for a folder whose weights are pickled: unpickling runs code.
    """
    name = str(source)
    if name.startswith("zoo:"):
        from mmspec import zoo

        return zoo.load(name.removeprefix("zoo:"))
    folder = Path(name)
    if folder.is_dir():
        _refuse_pickle(folder)
        if _model_type(folder) == FeatureHeadConfig.model_type:
            return load_head(folder)
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION,
    )

    config = transformers.AutoConfig.from_pretrained(name, **arguments)
    auto = (
        transformers.AutoModelForImageTextToText
        if config.model_type in VISION
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_pretrained(name, dtype=dtype, use_safetensors=True, **arguments)
    return model.eval()


def _model_type(folder: Path) -> str | None:
    file = folder / "config.json"
    return json.loads(file.read_text()).get("model_type") if file.exists() else None


def _refuse_pickle(folder: Path) -> None:
    if list(folder.glob("*.safetensors")):
        return
    pickled = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if pickled:
        raise ValueError(
            f"{folder} holds pickled weights ({', '.join(pickled)}), and unpickling runs code; "
            "convert them with model.save_pretrained(folder), which writes safetensors"
        )
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
