"""MAR draws pictures of continuous tokens behind a class (Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec import zoo
from mmspec.errors import is_whole
from mmspec.models.mar import MarForImageGeneration
from mmspec.models.mar_head import SampledHead
from mmspec.models.reading import read
from mmspec.targets.continuous.patches import CellQuery, PatchSettings
from mmspec.targets.continuous.paths import PathDistribution


@dataclass(frozen=True)
class MarReader:
    """A MAR model with the classes and the sampler of a call."""

    model: MarForImageGeneration
    classes: Tensor  # (B,)
    head: SampledHead

    @classmethod
    def of(cls, model: Any, classes: Tensor, plan: PatchSettings) -> MarReader:
        return cls(model, classes.to(model.device), model.sampled(plan))

    @property
    def cells(self) -> int:
        return self.model.config.cells

    def distribution(self, asked: CellQuery) -> PathDistribution:
        return self.model.distribution(self.head, asked, self.classes[asked.image])


def labels(model: MarForImageGeneration, given: Any) -> Tensor:  # (B,)
    """Classes as a tensor; None is no class.

    Raises ValueError for numbers that the model does not know.
    """
    none = model.config.num_classes
    if given is None or isinstance(given, int):
        given = [given]
    if isinstance(given, Tensor | np.ndarray | np.integer):
        given = torch.as_tensor(given).reshape(-1).tolist()
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ValueError(f"class_labels={given!r} are no classes; give a number or a list of them")
    wrong = [one for one in given if one is not None and not (is_whole(one) and 0 <= one < none)]
    if wrong:
        raise ValueError(
            f"class_labels={wrong[0]!r} is not known; give classes of this model, 0 to {none - 1}, "
            "or None for no class"
        )
    return torch.tensor([none if one is None else one for one in given])


def numbers(model: MarForImageGeneration, prompt: str | Sequence[str]) -> list[int]:
    """The classes that are called so in the configuration, or given as numbers.

    Raises ValueError for names that the model does not know.
    """
    asked = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(asked, list | tuple) or not all(isinstance(one, str) for one in asked):
        raise ValueError(f"prompt={prompt!r} names no class; give a name or a list of names")
    named: Any = model.config.label2id or {}
    known: dict[str, int] = {_plain(name): number for name, number in named.items()}
    found = []
    for one in asked:
        name = _plain(one)
        if name not in known and not name.isdigit():
            some = ", ".join(repr(label) for label in list(known)[:3])
            raise ValueError(
                f"prompt={one!r} is no class of this model; give a number, or one of the "
                f"{len(known)} names in model.config.label2id, such as {some}"
            )
        found.append(known[name] if name in known else int(name))
    return found


def load(source: str | Path) -> MarForImageGeneration:
    """A model from a folder or "zoo:NAME". Raises ValueError where there is none."""
    if str(source).startswith("zoo:"):
        found: MarForImageGeneration = zoo.load(str(source).removeprefix("zoo:"))
        return found
    if not (Path(source) / "config.json").exists():
        raise ValueError(f"{source} is no folder of a MAR model; give one, or zoo:NAME")
    model: MarForImageGeneration = read(MarForImageGeneration, source, "MAR model")
    return model


def _plain(name: str) -> str:
    """A name without capitals, spaces around it and an article."""
    words = name.lower().split()
    return " ".join(words[1:] if len(words) > 1 and words[0] in ("a", "an", "the") else words)
