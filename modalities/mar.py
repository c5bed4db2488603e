"""MAR draws pictures of continuous tokens behind a class (Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.models.mar import MarForImageGeneration
from mmspec.models.mar_head import SampledHead
from mmspec.patches import Plan
from mmspec.paths import PathLaw

SHARED = ("side", "channels", "patch_size", "num_classes", "base_steps", "latent_scale")


@dataclass(frozen=True)
class MarReader:
    """A MAR model with the classes and the sampler of a call."""

    model: MarForImageGeneration
    classes: Tensor  # (B,)
    head: SampledHead

    @classmethod
    def of(cls, model: Any, classes: Tensor, plan: Plan) -> MarReader:
        return cls(model, classes.to(model.device), model.sampled(plan))

    @property
    def cells(self) -> int:
        return self.model.config.cells

    def law(
        self,
        latents: Tensor,
        shown: Tensor,
        cells: Tensor,
        real: Tensor,
        image: Tensor,
        reach: Tensor,
    ) -> PathLaw:
        told = self.classes[image]
        return self.model.law(self.head, latents, shown, cells, real, told, reach)


def labels(model: MarForImageGeneration, given: Any) -> Tensor:  # (B,)
    """Classes as a tensor; None is no class.

    Raises ValueError for numbers that the model does not know.
    """
    none = model.config.num_classes
    if given is None or isinstance(given, int):
        given = [given]
    if isinstance(given, Tensor):
        given = given.reshape(-1).tolist()
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError(f"class_labels={given!r} are no classes; give a number or a list of them")
    wrong = [one for one in given if one is not None and not 0 <= one < none]
    if wrong:
        raise ValueError(
            f"class_labels={wrong[0]!r} is not known; this model has classes 0 to {none - 1}, and "
            "None for no class"
        )
    return torch.tensor([none if one is None else one for one in given])


def check_pair(target: Any, small: Any) -> None:
    """Refuse a draft model of other tokens. Raises ValueError."""
    if not isinstance(small, MarForImageGeneration):
        raise ValueError(
            f"drafter= is a {type(small).__name__}, but a MAR model is drafted for by a MAR model; "
            "give a smaller one of the same tokens"
        )
    for name in SHARED:
        own, theirs = getattr(target.config, name), getattr(small.config, name)
        if own != theirs:
            raise ValueError(
                f"the draft model has {name}={theirs} and the target {name}={own}, so they speak "
                "of other tokens; give two models for the same pictures"
            )
