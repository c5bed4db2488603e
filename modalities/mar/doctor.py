"""What `mmspec doctor` says of models of continuous tokens and of their draft models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmspec.drafters.denoising.patches import SHARED, check_tokens
from mmspec.modalities.common import doctor
from mmspec.modalities.common.doctor import both
from mmspec.modalities.mar.plug import session
from mmspec.modality import Finding
from mmspec.models.folder import configuration, tensors
from mmspec.models.mar import MarConfig, MarForImageGeneration


def examine(target: str, drafter: str | None) -> list[Finding]:
    """All findings on a target, or on a target and its draft model."""
    names = [name for name in (target, drafter) if name is not None]
    try:
        models = [_skeleton(name) for name in names]
    except ValueError as error:
        return [Finding("configuration", None, None, "refused", str(error))]
    found = [
        both("weights", list(zip(names, models, strict=True)), lambda one: doctor.weights(*one)),
        both("autoencoder, for pixels", [Path(target) / "vae"], _autoencoder),
    ]
    for name in SHARED:
        found.append(
            both(name.replace("_", " "), [model.config for model in models], vars_of(name))
        )
    if len(models) == 2:
        found.append(both("same tokens", [models], _same_tokens))
    if doctor.is_refused(found):
        return found
    small = models[1] if len(models) == 2 else None
    return [*found, *doctor.fitting("patches", session, models[0], small)]


def _same_tokens(pair: Sequence[Any]) -> bool:
    """Raises ValueError where target and draft model speak of other tokens."""
    check_tokens(pair[1], pair[0])
    return True


def vars_of(name: str) -> Callable[[Any], Any]:
    """Reads a value of a configuration."""
    return lambda config: vars(config)[name]


def _skeleton(name: str) -> Any:
    kind = configuration(Path(name) / "config.json").get("model_type")
    if kind != MarConfig.model_type:
        raise ValueError(f"{name} is a model of type {kind!r}, not a MAR; give another drafter")
    config = MarConfig.from_pretrained(name)
    return doctor.skeleton(lambda: MarForImageGeneration(config))


def _autoencoder(folder: Path) -> str:
    """Raises ValueError where there is none, or only a damaged one."""
    if not folder.is_dir():
        raise ValueError(f"there is no {folder}; put the autoencoder of the model there")
    return f"{len(tensors(folder))} tensors, safetensors"
