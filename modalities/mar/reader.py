"""Readers of class-conditional MAR models (Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec import zoo
from mmspec.errors import is_integer
from mmspec.models.loading import load_model
from mmspec.models.mar import MarForImageGeneration
from mmspec.models.mar_head import HeadSampler
from mmspec.models.placement import ANYWHERE, Placement
from mmspec.targets.continuous.patches import CellQuery, PatchSettings
from mmspec.targets.continuous.paths import PathDistribution


@dataclass(frozen=True)
class MarReader:
    """A MAR model with classes and sampler of one call."""

    model: MarForImageGeneration
    classes: Tensor  # (B,)
    head: HeadSampler

    @classmethod
    def of(cls, model: Any, classes: Tensor, plan: PatchSettings) -> MarReader:
        return cls(model, classes.to(model.device), model.make_sampler(plan))

    @property
    def cells(self) -> int:
        return self.model.config.cells

    def distribution(self, query: CellQuery) -> PathDistribution:
        return self.model.distribution(self.head, query, self.classes[query.image])


def class_tensor(model: MarForImageGeneration, given: Any) -> Tensor:  # (B,)
    """Class labels as a tensor; None is the null class.

    Raises ValueError for unknown class numbers.
    """
    none = model.config.num_classes
    if given is None or isinstance(given, int):
        given = [given]
    if isinstance(given, Tensor | np.ndarray | np.integer):
        given = torch.as_tensor(given).reshape(-1).tolist()
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError(f"class_labels={given!r} are not classes; give a number or a list of them")
    wrong = [one for one in given if one is not None and not (is_integer(one) and 0 <= one < none)]
    if wrong:
        raise ValueError(
            f"class_labels={wrong[0]!r} is not known; give classes of this model, 0 to {none - 1}, "
            "or None for no class"
        )
    return torch.tensor([none if one is None else one for one in given])


def class_numbers(model: MarForImageGeneration, prompt: str | Sequence[str]) -> list[int]:
    """Class numbers of names in the configuration; numerals are accepted too.

    Raises ValueError for unknown names.
    """
    names = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(names, list | tuple) or not all(isinstance(one, str) for one in names):
        raise ValueError(f"prompt={prompt!r} must be a class name or a list of class names")
    named: Any = model.config.label2id or {}
    known: dict[str, int] = {_normalise_name(name): number for name, number in named.items()}
    found = []
    for one in names:
        name = _normalise_name(one)
        if name not in known and not name.isdigit():
            some = ", ".join(repr(label) for label in list(known)[:3])
            raise ValueError(
                f"prompt={one!r} is not a class of this model; give a number, or one of the "
                f"{len(known)} names in model.config.label2id, such as {some}"
            )
        found.append(known[name] if name in known else int(name))
    return found


def load(source: str | Path, placement: Placement = ANYWHERE) -> MarForImageGeneration:
    """A model from a folder or "zoo:NAME". Raises ValueError if it cannot be loaded."""
    dtype = placement.torch_dtype
    if str(source).startswith("zoo:"):
        found: MarForImageGeneration = zoo.load(str(source).removeprefix("zoo:"), dtype)
        placed: MarForImageGeneration = placement.finish(found)
        return placed
    if not (Path(source) / "config.json").exists():
        raise ValueError(f"{source} is not a folder of a MAR model; give one, or zoo:NAME")
    model: MarForImageGeneration = load_model(MarForImageGeneration, source, "MAR model", dtype)
    placed = placement.finish(model)
    return placed


def _normalise_name(name: str) -> str:
    """The name in lower case, without surrounding spaces and leading article."""
    words = name.lower().split()
    return " ".join(words[1:] if len(words) > 1 and words[0] in ("a", "an", "the") else words)
