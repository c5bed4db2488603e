"""Heads on a target's states, as sorts of draft model: one object for each class of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mmspec.drafters.growth import DraftModel
from mmspec.models.loading import model_type
from mmspec.models.random_weights import random_model
from mmspec.models.reading import read
from mmspec.recipe import STATES, DraftModelKind
from mmspec.targets.readers.reader import Reader


@dataclass(frozen=True, eq=False)
class HeadKind(DraftModelKind):
    """Heads of one class, bound to a target as a `draft`.

    `parts` are what their configuration must say, `sizes` what it takes from a target besides
    widths. `fill` gives random heads what is no weight.
    """

    maker: type[PreTrainedModel]
    draft: Callable[[Reader, Any], DraftModel]
    words: str = "head"
    parts: Mapping[str, Any] = field(default_factory=dict)
    sizes: Callable[[Reader], Mapping[str, Any]] = lambda target: {}
    fill: Callable[[Any, int], None] | None = None  # (heads, seed)

    def accepts(self, model: Any) -> bool:
        return isinstance(model, self.maker) and self._has_parts(model.config)

    def owns(self, folder: Path) -> bool:
        config: Any = self.maker.config_class
        if not (folder / "config.json").exists() or model_type(folder) != config.model_type:
            return False
        return not self.parts or self._has_parts(config.from_pretrained(folder))

    def _has_parts(self, config: Any) -> bool:
        return all(getattr(config, name) == part for name, part in self.parts.items())

    def load(
        self, source: str | Path, target: Reader, dtype: torch.dtype | None = None
    ) -> PreTrainedModel:
        loaded: PreTrainedModel = read(self.maker, source, self.words, dtype)
        return loaded

    def default_sees(self, model: Any, target: Reader, asked: str) -> str:
        if asked not in ("auto", STATES):
            raise ValueError(
                f"sees={asked!r} does not fit: a {self.words} reads the target's states "
                f"({STATES!r}) and nothing else; drop sees=, or use another recipe"
            )
        return STATES

    def read(self, model: PreTrainedModel, target: Reader, sees: str) -> DraftModel:
        moved: Any = nn.Module.to(model, target.device, target.model.dtype)
        return self.draft(target, moved)

    def random(self, target: Reader, seed: int) -> Any:
        kind: Any = self.maker.config_class
        config = kind.of(target.config, target.vocabulary, **self.sizes(target), **self.parts)
        made = random_model(lambda: self.maker(config), seed)
        if self.fill is not None:
            self.fill(made, seed)
        return made
