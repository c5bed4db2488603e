"""Save and load accelerated models: the recipe, its parts and its drafter, not the target.

folder/mmspec.json    recipe, modality, parts and the name of the target
folder/drafter/       the draft model, if the recipe takes one; safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mmspec import zoo
from mmspec.models.folder import read_json
from mmspec.recipe import Recipe

if TYPE_CHECKING:
    from mmspec.accelerated import Accelerated

FILE = "mmspec.json"
DRAFTER = "drafter"  # the only folder that a file may name
OF_TARGET = (
    "processor",
    "codec",
    "codes",
    "actions",
)  # parts that belong to the target; never saved


def save(fast: Accelerated, folder: Path) -> None:
    """Write what `restore` reads, atomically. Raises ValueError for parts that cannot be saved."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give save_pretrained a folder")
    recipe, parts = fast.recipe, _serialise_parts(fast.recipe, fast.saved_parts)
    name = fast.session.name or None
    content = {
        "recipe": recipe.name,
        "modality": fast.modality.name,
        "target": name and (zoo.name_of(name) or name),
        "parts": parts,
        "drafter": DRAFTER if recipe.takes_drafter else None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".mmspec-", dir=folder) as scratch:  # existing files stay valid
        new = Path(scratch)
        fast.session.save(new / DRAFTER)
        (new / FILE).write_text(json.dumps(content, indent=2) + "\n")
        if (folder / DRAFTER).exists():
            (folder / DRAFTER).rename(new / "old")
        if (new / DRAFTER).exists():
            (new / DRAFTER).rename(folder / DRAFTER)
        (new / FILE).replace(folder / FILE)


def restore(folder: Path, model: Any) -> dict[str, Any]:
    """Read the arguments of `accelerate` that `save` wrote.

    Raises ValueError if the folder holds none, if the target is unknown, and for a file that
    points outside its folder.
    """
    file = folder / FILE
    if not file.exists():
        raise ValueError(f"{folder} has no {FILE}; give a folder that save_pretrained wrote")
    content = read_json(file)
    model = content["target"] if model is None else model
    if not model:
        raise ValueError(f"{file} names no target model; pass model=")
    named = content["drafter"]
    if named not in (None, DRAFTER):
        raise ValueError(
            f"{file} names the drafter {named!r}, which is not the folder {DRAFTER!r} beside it; "
            "save it again with save_pretrained"
        )
    return {
        "model": model,
        "recipe": content["recipe"],
        "modality": content.get("modality"),
        "drafter": None if named is None else folder / DRAFTER,
        **content["parts"],
    }


def _serialise_parts(recipe: Recipe, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parts given with a recipe as JSON values, without those of the target."""
    if not recipe.name:
        raise ValueError(
            "only a recipe from mmspec.recipes can be saved; this one was made by hand"
        )
    kept = {name: value for name, value in given.items() if name not in OF_TARGET}
    objects = [name for name, value in kept.items() if not _is_plain(value)]
    if objects:
        raise ValueError(
            f"{', '.join(objects)} was given as an object and cannot be saved; give a name or a "
            "number"
        )
    return kept


def _is_plain(value: Any) -> bool:
    """Whether JSON can represent it."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, str | int | float | bool) or value is None
