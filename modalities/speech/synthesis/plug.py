"""Codec language models of one codebook, such as CosyVoice 2, bound to a recipe: `synthesize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from transformers import AutoTokenizer

from mmspec.errors import format_value
from mmspec.modalities.common import families, tokens
from mmspec.modalities.common.text_generation import PlannedRequest, TextGenerator
from mmspec.modalities.speech import CODEC
from mmspec.modalities.speech.accelerated import AcceleratedSpeechModel
from mmspec.modalities.speech.codecs import Codec, load_codec
from mmspec.modalities.speech.speech_loop import Speech, SpeechLoop, SpeechStream
from mmspec.modalities.speech.synthesis.layout import FlatFrames, SpeechCodes
from mmspec.modalities.speech.synthesis.requests import prepare_request
from mmspec.modality import Loop
from mmspec.models.loading import load_text_processor
from mmspec.recipe import Recipe

tokenizer = partial(load_text_processor, maker=AutoTokenizer, kind="tokenizer")  # of a folder


class SpeechSession(tokens.TokenSession):
    """A codec language model bound to a recipe, with its codec and tokenizer."""

    interface = AcceleratedSpeechModel

    def __init__(
        self, bound: tokens.BoundTokens, codec: Codec, layout: SpeechCodes, processor: Any
    ) -> None:
        super().__init__(bound)
        self.codec, self.layout, self.processor = codec, layout, processor
        self.text = TextGenerator(bound)
        self.signature = self.text.signature

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        """`synthesize` as the method of that name; others as of the model itself."""
        if call == "synthesize":
            return self.synthesize(args, arguments, loop)
        return (self.text.generate if call == "generate" else self.text.hook)(args, arguments, loop)

    def plan(self, arguments: Mapping[str, Any]) -> PlannedRequest:
        """The checked request of one `synthesize` or `generate` call, for `mmspec.Engine`."""
        speaks = "text" in arguments
        return self.text.plan((), self.prepare_arguments((), arguments) if speaks else arguments)

    def open_stream(self, request: Mapping[str, Any]) -> SpeechStream:
        """The waveform of a request of `prepare_arguments`, whose tokens come in pieces."""
        return SpeechStream(self.codec, FlatFrames(self.layout, request["max_new_tokens"]))

    def synthesize(self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Speech:
        """Synthesize one text, or a list of them; arguments as of `AcceleratedSpeechModel`."""
        start, request = perf_counter(), self.prepare_arguments(args, arguments)
        frames = FlatFrames(self.layout, request["max_new_tokens"])
        speech_loop = SpeechLoop(loop, self.codec, frames, start)
        self.text.generate((), request, speech_loop)
        return speech_loop.speech()

    def prepare_arguments(
        self, args: Sequence[Any], arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of `generate` for those of `synthesize`."""
        return prepare_request(
            self.bound, self.codec, self.layout, self._load_tokenizer, args, arguments
        )

    def _load_tokenizer(self) -> Any:
        """The given tokenizer, else that of the model's folder, loaded on first use."""
        if self.processor is None:
            self.processor = tokenizer(self.name)
        return self.processor


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> SpeechSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    given = {name: parts.get(name) for name in ("codec", "codes", "processor")}
    layout, codec = SpeechCodes.of(model, given["codes"]), _codec(model, given["codec"])
    layout.check_codec(codec)
    if given["processor"] is not None and not callable(given["processor"]):
        raise ValueError(
            f"processor={given['processor']!r} cannot encode text; give the model's own tokenizer"
        )
    own = {name: value for name, value in parts.items() if name not in given}
    bound = tokens.bind(families.make_reader(model, {}), recipe, drafter, own)
    return SpeechSession(bound, codec, layout, given["processor"])


def _codec(model: Any, given: Any) -> Codec:
    """The given codec (a model, its folder, or one in the model's folder), else `CODEC` there."""
    own = Path(model.config._name_or_path or "")
    if isinstance(given, str | Path):
        return load_codec(_find_codec(own, given))
    if given is not None:
        return Codec.of(given)
    folder = own / CODEC
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{type(model).__name__} has no codec in its folder; give codec= a model of "
            "transformers (Encodec, Mimi, DAC, ...), or its folder"
        )
    return load_codec(folder)


def _find_codec(own: Path, given: str | Path) -> str | Path:
    """A codec beside the model's weights, or the folder or hub name that was given.

    Raises ValueError for what is none of them; a hub name is owner/name.
    """
    if (own / given / "config.json").is_file():
        return own / given
    is_hub_name = str(given).count("/") == 1 and not str(given).startswith((".", "/", "~"))
    if Path(given).is_dir() or (is_hub_name and not Path(given).parent.is_dir()):
        return given
    is_saved = own != Path() and own.is_dir()
    known = sorted(one.parent.name for one in own.glob("*/config.json")) if is_saved else []
    listed = f" ({', '.join(known)})" if known else ""
    raise ValueError(
        f"codec={format_value(str(given))} is no folder, and none of those beside the model's "
        f"weights{listed}; give one, or a hub name: owner/name"
    )


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder, a hub name, or "zoo:NAME"."""
    return tokens.load_token_model(source, **options)
