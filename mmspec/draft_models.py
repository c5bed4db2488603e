"""Load the draft model that a recipe takes, bind it to the target, and find its kind."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmspec import recipes, zoo
from mmspec.draft import Drafter
from mmspec.errors import with_article
from mmspec.models.compatibility import (
    KEY,
    check_signature,
    find_body_change,
    find_change,
    sign_head,
)
from mmspec.recipe import STATES, DraftModelKind, Recipe

ZOO = "zoo:"


@dataclass(frozen=True)
class BoundDraftModel:
    """A draft model bound to its target."""

    kind: DraftModelKind
    model: Any  # as given or loaded
    reader: Any  # as its kind reads it
    sees: str

    def save(self, folder: Path, target: Any, drafter: Any) -> None:
        """Write the model and what was trained with it; a head records its target."""
        if self.sees == STATES and KEY not in vars(self.model.config):
            sign_head(self.model, target)
        self.kind.save(self.model, folder, target, drafter)


def draft_model(recipe: Recipe, drafter: Any, target: Any) -> BoundDraftModel | None:
    """Bind the draft model that the recipe takes to the target; a name or folder is loaded first.

    Without one, that of the target's checkpoint is used.

    Raises ValueError if it is missing, if the recipe takes none, or if it is of another kind.
    """
    if drafter is None:
        found = (kind.find(target) for kind in recipe.draft_model)
        drafter = next((one for one in found if one is not None), None)
    if drafter is None and recipe.takes_drafter:
        raise ValueError(
            f"recipe {recipe.name!r} needs {recipe.drafter_description}; "
            "give drafter= a model, a folder or 'zoo:NAME'"
        )
    if drafter is None:
        return None
    if not recipe.takes_drafter:
        raise ValueError(f"recipe {recipe.name!r} takes no draft model; drop drafter=")
    if isinstance(drafter, type):
        raise ValueError(f"drafter= is the class {drafter.__name__}; give an object of it")
    model = _load(recipe, drafter, target) if isinstance(drafter, str | Path) else drafter
    kind = next((one for one in recipe.draft_model if one.accepts(model)), None)
    if kind is None:
        raise ValueError(
            f"recipe {recipe.name!r} needs {recipe.drafter_description}, "
            f"and drafter= is {with_article(type(model).__name__)}; give such a draft model (for "
            "tokens also an object that inherits mmspec.draft.Drafter), or use another recipe"
        )
    check_signature(model, target)
    if not recipe.exact:
        _warn_of_change(recipe, model, target)
    sees = kind.default_sees(model, target, recipe.sees)
    return BoundDraftModel(kind, kind.unwrap(model), kind.read(model, target, sees), sees)


def check_no_shape(drafter: Drafter, parts: Mapping[str, Any]) -> None:
    """Refuse `tree` and `length` beside a `Drafter`, which decides both. Raises ValueError."""
    given = [f"{name}=" for name in ("tree", "length") if parts.get(name) is not None]
    if given:
        raise ValueError(
            f"{' and '.join(given)} would change nothing: a {type(drafter).__name__} object "
            "decides what it drafts; give it to that object, and drop it here"
        )


def _warn_of_change(recipe: Recipe, head: Any, target: Any) -> None:
    """Warn of a head of other weights than the target's: a lossy recipe may keep its own tokens.

    Exact recipes accept fewer drafts, and their output is the target's all the same.
    """
    agreement, difference = find_change(head, target), None
    if agreement is not None:
        found = (
            f"fingerprints of their output heads agree to {agreement:.3f}, those of one model to "
            "0.999 or more"
        )
    elif (difference := find_body_change(head, target)) is not None:
        found = (
            f"linear layers of their decoders differ by up to {difference:.1%}, those of one model "
            "in another dtype by 0.3%"
        )
    else:
        return
    name = target.model.config._name_or_path or type(target.model).__name__
    warnings.warn(
        f"{type(head).__name__} {head.config._name_or_path!r} was trained on other weights than "
        f"those of {name!r}: {found}. Recipe {recipe.name or 'custom'!r} is lossy and may keep "
        "tokens of the head, so quality may be worse than with the head's own target; train a head "
        "for this target with `mmspec train`, give the target it was made for, or choose an exact "
        "recipe",
        stacklevel=2,
    )


def find_kinds(*decodes: str) -> tuple[DraftModelKind, ...]:
    """All kinds of draft models that recipes take; of those only that decode this, if given."""
    plans = [recipes.get(name) for name in recipes.names(*decodes)]
    return tuple(dict.fromkeys(kind for plan in plans for kind in plan.draft_model))


def find_owners(kinds: Iterable[DraftModelKind], folder: Path) -> list[DraftModelKind]:
    """The kinds that recognise what a folder holds."""
    return [kind for kind in kinds if folder.is_dir() and kind.owns(folder)]


def _load(recipe: Recipe, source: str | Path, target: Any) -> Any:
    """Load a model from a folder, a hub name or "zoo:NAME"; its folder decides the kind."""
    dtype = None
    if str(source).startswith(ZOO):
        source, dtype = zoo.path(str(source)), torch.float32
    owners = find_owners(recipe.draft_model, Path(source)) or recipe.draft_model
    return owners[0].load(source, target, dtype)
