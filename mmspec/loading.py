"""Models from folders.

Weights load from safetensors only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.models.folder import configuration, tensors
from mmspec.models.heads.feature_head import FeatureHeadConfig, load_head


def load_model(
    source: str | Path,
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
    **arguments: Any,
) -> Any:
    """Load a causal or vision-language model from a folder, a hub name, or "zoo:NAME".

    A folder of a feature head gives a `mmspec.models.heads.feature_head.FeatureHead`.
    Raises ValueError for a folder whose weights are pickled (unpickling runs code) or lack a part,
    and for code in the folder unless that is trusted.
    """
    name = str(source)
    if name.startswith("zoo:"):
        from mmspec import zoo

        return zoo.load(name.removeprefix("zoo:"))
    folder = Path(name)
    if folder.is_dir():
        check_folder(folder)
        if _model_type(folder) == FeatureHeadConfig.model_type:
            return load_head(folder)
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION,
    )

    arguments["trust_remote_code"] = trust_remote_code
    config = transformers.AutoConfig.from_pretrained(name, **arguments)
    auto = (
        transformers.AutoModelForImageTextToText
        if config.model_type in VISION
        else transformers.AutoModelForCausalLM
    )
    return complete(auto, name, dtype=dtype, **arguments)


def complete(maker: Any, name: str, **arguments: Any) -> Any:
    """A model in eval mode whose weights are all there, from safetensors.

    Raises ValueError naming what is missing: transformers would fill it with random numbers.
    """
    model, found = maker.from_pretrained(
        name, use_safetensors=True, output_loading_info=True, **arguments
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(
            f"the weights in {name} lack {len(missing)} tensors, such as {missing[0]}; they would "
            "be random numbers: copy the weights again, or load the class that they were saved as"
        )
    return model.eval()


def check_folder(folder: Path) -> None:
    """Refuse what is no model, pickled or damaged weights. Raises ValueError, naming the file."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    tensors(folder)


def _model_type(folder: Path) -> str | None:
    file = folder / "config.json"
    return configuration(file).get("model_type") if file.exists() else None
