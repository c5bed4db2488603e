"""Text and vision-language models of transformers: `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.modalities.common import own_generate, tokens
from mmspec.modalities.common.call_arguments import bind_arguments
from mmspec.modalities.common.families import make_reader
from mmspec.modalities.common.text_generation import PlannedRequest, TextGenerator
from mmspec.modalities.vlm.accelerated import AcceleratedLanguageModel
from mmspec.modality import Loop
from mmspec.recipe import Recipe


class LanguageSession(tokens.TokenSession):
    """A causal or encoder-decoder model bound to a recipe."""

    interface = AcceleratedLanguageModel

    def __init__(self, bound: tokens.BoundTokens) -> None:
        super().__init__(bound)
        self.text = TextGenerator(bound)
        self.signature = self.text.signature

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        run = self.text.generate if call == "generate" else self.text.hook
        return run(args, arguments, loop)

    def plan(self, arguments: Mapping[str, Any]) -> PlannedRequest:
        """The checked request of one `generate` call, for `mmspec.Engine`."""
        return own_generate.plan(self.model, self.text, arguments)


class OwnGenerateSession(LanguageSession):
    """A model with its own `generate()`, whose generating submodule is bound to a recipe."""

    def __init__(self, bound: tokens.BoundTokens, model: Any) -> None:
        super().__init__(bound)
        self.model = model

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        if call != "generate":
            return super().run(call, args, arguments, loop)
        given = bind_arguments(args, arguments, self.model.main_input_name)
        return own_generate.generate(self.model, self.text, given, loop)


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> LanguageSession:
    """Bind a recipe to a model. Raises ValueError for parts that do not fit."""
    part = own_generate.find_generating_part(model)
    bound = tokens.bind(make_reader(model if part is None else part), recipe, drafter, parts)
    return LanguageSession(bound) if part is None else OwnGenerateSession(bound, model)


def load(source: str | Path, **options: Any) -> Any:
    """Load a model from a folder, a hub name, or "zoo:NAME"."""
    return tokens.load_token_model(source, **options)
