"""Who drafts for a target: the draft model that a recipe takes, bound, and what it sees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmspec import zoo
from mmspec.errors import an
from mmspec.models.fingerprint import check_signed, sign
from mmspec.recipe import STATES, DraftModelKind, Recipe

ZOO = "zoo:"


@dataclass(frozen=True)
class BoundDraftModel:
    """A draft model bound to its target."""

    kind: DraftModelKind
    model: Any  # as it was given or loaded
    reader: Any  # as its sort reads it
    sees: str

    def save(self, folder: Path, target: Any, drafter: Any) -> None:
        """Write it, and what was learned beside it; a head notes its target."""
        if self.sees == STATES:
            sign(self.model, target)
        self.kind.save(self.model, folder, target, drafter)


def draft_model(recipe: Recipe, drafter: Any, target: Any) -> BoundDraftModel | None:
    """The draft model that the recipe takes, loaded where it is named, and bound to the target.

    Raises ValueError where there must be one, must be none, or one of another sort.
    """
    if drafter is None and recipe.takes_drafter:
        raise ValueError(
            f"recipe {recipe.name!r} needs {recipe.wanted}; "
            "give drafter= a model, a folder or 'zoo:NAME'"
        )
    if drafter is None:
        return None
    if not recipe.takes_drafter:
        raise ValueError(f"recipe {recipe.name!r} takes no draft model; drop drafter=")
    model = loaded(recipe, drafter, target) if isinstance(drafter, str | Path) else drafter
    kind = next((one for one in recipe.draft_model if one.accepts(model)), None)
    if kind is None:
        raise ValueError(
            f"recipe {recipe.name!r} needs {recipe.wanted}, "
            f"but {an(type(model).__name__)} is none; give drafter= another model "
            "(for tokens also one that inherits mmspec.draft.Drafter), or use another recipe"
        )
    check_signed(model, target)
    sees = kind.default_sees(model, target, recipe.sees)
    return BoundDraftModel(kind, model, kind.read(model, target, sees), sees)


def loaded(recipe: Recipe, source: str | Path, target: Any) -> Any:
    """A model from a folder, a hub name or "zoo:NAME", by the sort of its folder."""
    dtype = None
    if str(source).startswith(ZOO):
        source, dtype = zoo.path(str(source)), torch.float32
    kinds, folder = recipe.draft_model, Path(source)
    owners = [kind for kind in kinds if folder.is_dir() and kind.owns(folder)]
    return (owners or kinds)[0].load(source, target, dtype)
