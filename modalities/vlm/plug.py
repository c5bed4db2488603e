"""Text and vision-language models of transformers, and recognisers of speech: `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.modalities import tokens
from mmspec.modalities.text import HOOK, Text
from mmspec.modalities.vlm.families import reader
from mmspec.modality import Loop
from mmspec.models.loading import load_causal
from mmspec.recipe import Recipe
from mmspec.targets.encoder_decoder import EncoderDecoder, source_inputs


class LanguageSession(tokens.TokenSession):
    """A causal or encoder-decoder model bound to a recipe."""

    calls = ("generate", "__call__")
    signature = HOOK

    def __init__(self, bound: tokens.BoundTokens) -> None:
        super().__init__(bound)
        self.text = Text(bound, self._prepared)

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        asked = self.text.generate if call == "generate" else self.text.hook
        return asked(args, arguments, loop)

    def _prepared(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(self.bound.backbone, EncoderDecoder):
            return source_inputs(self.model, inputs)
        return dict(inputs)


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> LanguageSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    return LanguageSession(tokens.bind(reader(model), recipe, drafter, parts))


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder, a hub name, or "zoo:NAME"."""
    name = str(source)
    if name.startswith("zoo:"):
        return zoo.load(name.removeprefix("zoo:"))
    return load_causal(name, **options)
