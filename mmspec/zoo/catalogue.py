"""What is in the zoo, and where it lies: the checkpoints of all modalities."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec import registry
from mmspec.modality import Entry, Modality

if TYPE_CHECKING:
    from mmspec.recipe import Recipe

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The names of all checkpoints."""
    return tuple(entry.name for one in registry.modalities().values() for entry in one.zoo)


def info(name: str) -> Entry:
    """What is known of a checkpoint; `name` may be an alias, such as "vlm"."""
    return _found(name)[0]


def modality(name: str) -> Modality:
    """Whose checkpoint it is."""
    return _found(name)[1]


def path(name: str) -> Path:
    """The folder of a checkpoint, an ordinary Hugging Face or diffusers one.

    Those of other packages lie in the folder "checkpoints" beside the loader.
    """
    entry = info(name)
    if entry.loader.startswith("mmspec."):
        return FOLDER / "checkpoints" / entry.name
    spec = find_spec(entry.loader)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "checkpoints" / entry.name


def name_of(folder: str | Path) -> str | None:
    """`zoo:NAME` of the checkpoint that lies in a folder, wherever the package was installed."""
    return next((registry.ZOO + one for one in names() if path(one) == Path(folder)), None)


def is_present(name: str) -> bool:
    """Whether a checkpoint has been trained: a model or a pipeline lies in its folder."""
    return holds_model(path(name))


def holds_model(folder: Path) -> bool:
    """Whether a model or a pipeline lies in a folder."""
    return any((folder / file).exists() for file in ("config.json", "model_index.json"))


def drafter_for(model: str, recipe: Recipe) -> str | None:
    """`zoo:NAME` of a draft model for the target `zoo:NAME`, of a sort that the recipe takes.

    Of several it is the one that sees as much of the prompt as the recipe wants. None where there
    is none, or the recipe takes none, or the model is not of the zoo.
    """
    if not recipe.takes_drafter or not model.startswith(registry.ZOO):
        return None
    whose = info(model)
    small = [one for one in map(info, names()) if one.target == whose.name]
    fits = [one for one in small if any(kind.owns(path(one.name)) for kind in recipe.draft_model)]
    fits.sort(key=lambda one: (one.sees != recipe.sees, one.name != whose.drafter))
    return registry.ZOO + fits[0].name if fits else None


def bundled_scene() -> Path:
    """A picture to try things on: a PNG of 256 x 256 pixels."""
    return FOLDER / "scene.png"


def _found(name: str) -> tuple[Entry, Modality]:
    full = registry.checkpoint(name)
    return next(
        (entry, one)
        for one in registry.modalities().values()
        for entry in one.zoo
        if entry.name == full
    )
