"""Text and vision-language models of transformers: `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.modalities.common import tokens, whole
from mmspec.modalities.common.families import reader
from mmspec.modalities.common.text import Text, placed
from mmspec.modality import Loop
from mmspec.models.loading import load_causal
from mmspec.recipe import Recipe


class LanguageSession(tokens.TokenSession):
    """A causal or encoder-decoder model bound to a recipe."""

    calls = ("generate", "__call__")

    def __init__(self, bound: tokens.BoundTokens) -> None:
        super().__init__(bound)
        self.text = Text(bound)
        self.signature = self.text.signature

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        asked = self.text.generate if call == "generate" else self.text.hook
        return asked(args, arguments, loop)


class WholeSession(LanguageSession):
    """A model with a `generate()` of its own, and what speaks in it."""

    def __init__(self, bound: tokens.BoundTokens, model: Any) -> None:
        super().__init__(bound)
        self.model = model

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        if call != "generate":
            return super().run(call, args, arguments, loop)
        given = placed(args, arguments, self.model.main_input_name)
        return whole.generate(self.model, self.text, given, loop)


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> LanguageSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    part = whole.speaking_part(model)
    bound = tokens.bind(reader(model if part is None else part), recipe, drafter, parts)
    return LanguageSession(bound) if part is None else WholeSession(bound, model)


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder, a hub name, or "zoo:NAME"."""
    name = str(source)
    if name.startswith("zoo:"):
        return zoo.load(name.removeprefix("zoo:"))
    return load_causal(name, **options)
