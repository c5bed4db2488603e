"""From what a user types to a model that draws continuous tokens: models, classes, settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.cli import inputs as given

RECIPES = ("cspd-coupled", "cspd")
MODEL_TYPE = "mar"


@dataclass(frozen=True)
class Easel:
    """A model with its autoencoder and draft model, and what goes with every call."""

    names: tuple[str, str]  # as typed: target, drafter
    model: Any
    drafter: Any
    vae: Any
    settings: dict[str, Any]
    parts: dict[str, Any]

    @property
    def is_zoo(self) -> bool:
        return self.names[0].startswith("zoo:")

    def fast(self, recipe: str) -> Any:
        """The model under a recipe."""
        from mmspec.api import accelerate

        return accelerate(self.model, recipe, drafter=self.drafter, **self.parts)

    def asked(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Arguments of a call that draws these: classes by name or number."""
        from mmspec.modalities.mar.reader import numbers

        return {"class_labels": numbers(self.model, prompts)}


def is_continuous(model: str) -> bool:
    """Whether a model draws continuous tokens, by the configuration in its folder."""
    file = Path(given.folder(model)) / "config.json"
    return file.exists() and json.loads(file.read_text()).get("model_type") == MODEL_TYPE


def load(
    model: str,
    drafter: str | None,
    recipes: Sequence[str],
    steps: int | None,
    guidance: float | None,
    temperature: float | None,
    parts: Mapping[str, Any],
) -> Easel:
    """Load a target, its autoencoder, and its draft model (the zoo's own by default).

    What `--set` names is a setting of the sampler or a knob of the recipe. Raises ValueError for
    recipes of another sort.
    """
    from mmspec import recipes as known
    from mmspec.modalities.mar.plug import SETTINGS
    from mmspec.modalities.mar.reader import load as loaded

    for name in recipes:
        if known.get(name).decodes != "patches":
            raise ValueError(
                f"recipe {name!r} decodes {known.get(name).decodes}; for continuous tokens there "
                f"are {', '.join(known.names('patches'))}"
            )
    drafter = drafter or given.default_drafter(model)
    if drafter is None:
        raise ValueError(f"recipe {recipes[0]!r} needs a draft model; give --drafter DIR")
    target, small = (loaded(given.present(name)) for name in (model, drafter))
    typed = {"steps": steps, "guidance": guidance, "temperature": temperature}
    settings = _defaults(model) | {n: v for n, v in typed.items() if v is not None}
    settings |= {name: value for name, value in parts.items() if name in SETTINGS}
    rest = {name: value for name, value in parts.items() if name not in SETTINGS}
    return Easel((model, drafter), target, small, _autoencoder(model), settings, rest)


def _defaults(model: str) -> dict[str, Any]:
    """Settings if nothing is said; what an exact recipe needs is said of all alike."""
    if not model.startswith("zoo:"):
        return {"last_noise": True}
    from mmspec.modalities.mar.zoo.models import GUIDANCE, HEAD_STEPS, STEPS

    asked = {"steps": STEPS, "guidance": GUIDANCE, "head_steps": HEAD_STEPS}
    return {**asked, "last_noise": True}


def _autoencoder(model: str) -> Any:
    """What makes pixels: the folder "vae" beside the model."""
    folder = Path(given.folder(model)) / "vae"
    if not folder.exists():
        raise ValueError(f"there is no {folder}; put the autoencoder of the model there")
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    load: Any = diffusers.AutoModel.from_pretrained
    return load(str(folder), torch_dtype="auto", local_files_only=True).float().eval()
