"""Speech recognition models, encoder-decoders and language models, bound to a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.modalities.common import families, own_generate, tokens
from mmspec.modalities.common.call_arguments import bind_arguments
from mmspec.modalities.common.text_generation import PlannedRequest, TextGenerator
from mmspec.modalities.speech.recognition import whisper_generate
from mmspec.modalities.speech.recognition.accelerated import AcceleratedRecogniser
from mmspec.modalities.speech.recognition.transcription import transcribe
from mmspec.modality import Loop
from mmspec.recipe import Recipe
from mmspec.targets.readers.reader import Family, Reader

FAMILIES: Mapping[str, Family] = {"whisper": Family("Whisper", media=("input_features",))}


class RecognitionSession(tokens.TokenSession):
    """A recogniser bound to a recipe; `processor` extracts features and decodes tokens."""

    interface = AcceleratedRecogniser

    def __init__(self, bound: tokens.BoundTokens, processor: Any = None) -> None:
        super().__init__(bound)
        self.processor = processor
        self.text = TextGenerator(bound)
        self.signature = self.text.signature

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        """`transcribe` as the function of that name; others as of the model itself."""
        if call == "__call__":
            return self.text.hook(args, arguments, loop)
        if call == "transcribe":
            return transcribe(self, args, arguments, loop)
        return self.generate(bind_arguments(args, arguments, self.model.main_input_name), loop)

    def plan(self, arguments: Mapping[str, Any]) -> PlannedRequest:
        """The checked request of one `generate` call, for `mmspec.Engine`."""
        return own_generate.plan(self.model, self.text, arguments)

    def generate(self, arguments: Mapping[str, Any], loop: Loop) -> Any:
        """Generate as the model's own `generate()`, with our loop inside."""
        if whisper_generate.has_whisper_generate(self.model):
            return whisper_generate.generate(self.text, arguments, loop)
        if own_generate.find_generating_part(self.model) is not None:
            return own_generate.generate(self.model, self.text, arguments, loop)
        return self.text.generate((), arguments, loop)


def make_reader(model: Any) -> Reader:
    """An `EncoderDecoder`, or a `Backbone` for speech language models."""
    return families.make_reader(model, FAMILIES)


def session(
    model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]
) -> RecognitionSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    bound = tokens.bind(make_reader(model), recipe, drafter, parts)
    return RecognitionSession(bound, parts.get("processor"))


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder, a hub name, or "zoo:NAME"."""
    return tokens.load_token_model(source, **options)
