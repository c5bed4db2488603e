"""Language models that speak codes of one codebook (CosyVoice 2 and its like): `synthesize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mmspec import zoo
from mmspec.modalities.common import readers, tokens
from mmspec.modalities.common.text import Text
from mmspec.modalities.speech.codecs import Codec, load_codec
from mmspec.modalities.speech.spoken import SpeakingLoop, Speech
from mmspec.modalities.speech.synthesis import CODEC
from mmspec.modalities.speech.synthesis.asked import prepare
from mmspec.modalities.speech.synthesis.layout import FlatFrames, SpeechCodes
from mmspec.modality import Loop
from mmspec.models.loading import load_causal, word_reader
from mmspec.recipe import Recipe
from mmspec.registry import ZOO

tokenizer = partial(word_reader, maker=AutoTokenizer, kind="tokenizer")  # of a folder


class SpeechSession(tokens.TokenSession):
    """A language model that speaks, with its codec and tokenizer, bound to a recipe."""

    calls = ("synthesize", "generate", "__call__")

    def __init__(
        self, bound: tokens.BoundTokens, codec: Codec, layout: SpeechCodes, processor: Any
    ) -> None:
        super().__init__(bound)
        self.codec, self.layout, self.processor = codec, layout, processor
        self.text = Text(bound)
        self.signature = self.text.signature

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        """`synthesize` takes what the method of that name says; the others as the model's own."""
        if call == "synthesize":
            return self.synthesize(args, arguments, loop)
        return (self.text.generate if call == "generate" else self.text.hook)(args, arguments, loop)

    def synthesize(self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Speech:
        """Speak one text, or a list of them.

        Takes the text by place or as `text=`, or `input_ids` and `attention_mask` of prompts that
        end with the id that begins speech; `voice=` a name, or one per text; `max_new_tokens` codes
        or `seconds` of sound; `repetition_aware=True` (see `mmspec.distributions.repetition`), and
        settings of `generate` beside, among them `seed` and `row_ids`. If nothing is said, codes
        are drawn, as greedy speech tends to loop, at the temperature of the model's generation
        configuration, 1 where that has none. All that is no code is never said.
        """
        asked = self.asked(args, arguments)
        speaking = SpeakingLoop(loop, self.codec, FlatFrames(self.layout, asked["max_new_tokens"]))
        self.text.generate((), asked, speaking)
        return speaking.speech()

    def asked(self, args: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What `synthesize` asks of `generate`."""
        return prepare(self.bound, self.codec, self.layout, self._words, args, arguments)

    def _words(self) -> Any:
        """The tokenizer that was given, or the one beside the weights, read when it is needed."""
        if self.processor is None:
            self.processor = tokenizer(self.name)
        return self.processor


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> SpeechSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    given = {name: parts.get(name) for name in ("codec", "codes", "processor")}
    layout, codec = SpeechCodes.of(model, given["codes"]), _codec(model, given["codec"])
    layout.fit(codec)
    if given["processor"] is not None and not callable(given["processor"]):
        raise ValueError(
            f"processor={given['processor']!r} cannot read texts; give the model's own tokenizer"
        )
    own = {name: value for name, value in parts.items() if name not in given}
    bound = tokens.bind(readers.reader(model, {}), recipe, drafter, own)
    return SpeechSession(bound, codec, layout, given["processor"])


def _codec(model: Any, given: Any) -> Codec:
    """The codec that was given, by itself or by its folder; else the one beside the weights."""
    if given is not None:
        return load_codec(given) if isinstance(given, str | Path) else Codec.of(given)
    folder = Path(model.config._name_or_path or "") / CODEC
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{type(model).__name__} has no codec beside its weights; give codec= a model of "
            "transformers (Encodec, Mimi, DAC, ...), or its folder"
        )
    return load_codec(folder)


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder, a hub name, or "zoo:NAME"."""
    name = str(source)
    if name.startswith(ZOO):
        return zoo.load(name.removeprefix(ZOO))
    return load_causal(name, **options)
