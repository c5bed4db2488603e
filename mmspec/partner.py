"""Who drafts for a target: the draft model that a recipe takes, and what it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from mmspec.drafters.neural.feature_head import SEES, FeatureDraft
from mmspec.drafters.neural.small_model import check_pair
from mmspec.loading import load_model
from mmspec.modalities.families import backbone
from mmspec.models.heads.feature_head import FeatureHead
from mmspec.recipe import Recipe
from mmspec.targets.reader import Reader


def is_drafter(drafter: Any) -> bool:
    """Whether this drafts by itself, whatever the recipe says."""
    return all(hasattr(drafter, name) for name in ("propose", "observe"))


def small_of(recipe: Recipe, drafter: Any, target: Reader) -> Reader | FeatureDraft | None:
    """The draft model or the feature head that the recipe takes, loaded where it is named."""
    if drafter is None and recipe.takes_drafter:
        kind = "feature head" if recipe.partner == "head" else "draft model"
        raise ValueError(
            f"recipe {recipe.name!r} needs a {kind}; give drafter= a model, a folder or 'zoo:NAME'"
        )
    if drafter is None:
        return None
    if not recipe.takes_drafter:
        raise ValueError(f"recipe {recipe.name!r} takes no draft model; drop drafter=")
    model = load_model(drafter) if isinstance(drafter, str | Path) else drafter
    if isinstance(model, FeatureHead):
        moved: FeatureHead = nn.Module.to(model, target.device, target.model.dtype)
        return FeatureDraft(target, moved)
    if recipe.partner == "head":
        raise ValueError(
            f"recipe {recipe.name!r} needs a feature head, but {type(model).__name__} is a whole "
            "model; give drafter= a mmspec.models.heads.feature_head.FeatureHead or its folder, or "
            "use another recipe, such as 'dynamic-tree'"
        )
    return backbone(model)


def sight_of(target: Reader, small: Reader | FeatureDraft | None, sees: str) -> str:
    """What the draft model sees: its own pixels where it can, if the recipe leaves it open."""
    if small is None:
        return sees
    if isinstance(small, FeatureDraft) != (sees == SEES):
        if isinstance(small, FeatureDraft) and sees == "auto":
            return SEES
        raise ValueError(
            f"sees={sees!r} does not fit: a feature head reads the target's states ({SEES!r}), and "
            "nothing else does; drop sees=, or use another recipe"
        )
    if isinstance(small, FeatureDraft):
        return sees
    if sees == "auto" and target.family.draws:
        sees = "prompt"
    elif sees == "auto":
        sees = "pixels" if small.family.media and target.family.media else "nothing"
    check_pair(target, small, sees)
    return sees


def bind_draft_model(recipe: Recipe, drafter: Any, target: Any) -> tuple[Any, str]:
    """The reader of what drafts for a target, and what it sees. Raises ValueError for misfits."""
    small = small_of(recipe, drafter, target)
    return small, sight_of(target, small, recipe.sees)
