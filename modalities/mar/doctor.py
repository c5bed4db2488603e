"""`mmspec doctor` for models of continuous tokens and their draft models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmspec.drafters.denoising.patches import SHARED_CONFIG, check_tokens
from mmspec.modalities.common import doctor
from mmspec.modalities.common.doctor import check_models
from mmspec.modalities.mar.plug import session
from mmspec.modality import Finding
from mmspec.models.folder import read_json, read_shapes
from mmspec.models.mar import MarConfig, MarForImageGeneration


def examine(target: str, drafter: str | None) -> list[Finding]:
    """All findings on a target, or on a target and its draft model."""
    names = [name for name in (target, drafter) if name is not None]
    try:
        models = [_skeleton(name) for name in names]
    except ValueError as error:
        return [Finding("configuration", None, None, "refused", str(error))]
    found = [
        check_models(
            "weights", list(zip(names, models, strict=True)), lambda one: doctor.check_weights(*one)
        ),
        check_models("autoencoder, for pixels", [Path(target) / "vae"], _autoencoder),
    ]
    for name in SHARED_CONFIG:
        found.append(
            check_models(
                name.replace("_", " "), [model.config for model in models], read_field(name)
            )
        )
    if len(models) == 2:
        found.append(check_models("same tokens", [models], _same_tokens))
    if doctor.is_refused(found):
        return found
    small = models[1] if len(models) == 2 else None
    return [*found, *doctor.find_fitting_recipes(session, models[0], small)]


def _same_tokens(pair: Sequence[Any]) -> bool:
    """Raises ValueError if target and draft model have different tokens."""
    check_tokens(pair[1], pair[0])
    return True


def read_field(name: str) -> Callable[[Any], Any]:
    """A function that reads one field of a configuration."""
    return lambda config: vars(config)[name]


def _skeleton(name: str) -> Any:
    kind = read_json(Path(name) / "config.json").get("model_type")
    if kind != MarConfig.model_type:
        raise ValueError(
            f"{name} has model type {kind!r}, not {MarConfig.model_type!r}; give a MAR"
        )
    config = MarConfig.from_pretrained(name)
    return doctor.skeleton(lambda: MarForImageGeneration(config))


def _autoencoder(folder: Path) -> str:
    """Raises ValueError for a missing or damaged autoencoder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist; put the autoencoder of the model there")
    return f"{len(read_shapes(folder))} tensors, safetensors"
