"""Recognisers of speech, encoder-decoders and language models: `generate` and `transcribe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec import zoo
from mmspec.modalities.common import tokens, whole
from mmspec.modalities.common.text import Text, placed
from mmspec.modalities.speech.recognition import own_generate
from mmspec.modalities.speech.recognition.families import reader
from mmspec.modalities.speech.recognition.transcribing import transcribe
from mmspec.modality import Loop
from mmspec.models.loading import load_causal
from mmspec.recipe import Recipe
from mmspec.registry import ZOO


class RecognitionSession(tokens.TokenSession):
    """A recogniser bound to a recipe; `processor` makes features of sounds, and words of tokens."""

    calls = ("generate", "transcribe", "__call__")

    def __init__(self, bound: tokens.BoundTokens, processor: Any = None) -> None:
        super().__init__(bound)
        self.processor = processor
        self.text = Text(bound)
        self.signature = self.text.signature

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        """`transcribe` takes what the function of that name says; the others as the model's own."""
        if call == "__call__":
            return self.text.hook(args, arguments, loop)
        if call == "transcribe":
            return transcribe(self, args, arguments, loop)
        return self.ask(placed(args, arguments, self.model.main_input_name), loop)

    def ask(self, arguments: Mapping[str, Any], loop: Loop) -> Any:
        """`generate`: as the model's own, whatever that does beside the loop."""
        if own_generate.is_own(self.model):
            return own_generate.generate(self.text, arguments, loop)
        if whole.speaking_part(self.model) is not None:
            return whole.generate(self.model, self.text, arguments, loop)
        return self.text.generate((), arguments, loop)


def session(
    model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]
) -> RecognitionSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    bound = tokens.bind(reader(model), recipe, drafter, parts)
    return RecognitionSession(bound, parts.get("processor"))


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder, a hub name, or "zoo:NAME"."""
    name = str(source)
    if name.startswith(ZOO):
        return zoo.load(name.removeprefix(ZOO))
    return load_causal(name, **options)
