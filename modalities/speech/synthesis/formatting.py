"""From what is typed to speech, and from speech to files: WAV and spectrograms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel

from mmspec.errors import reading
from mmspec.modalities.common import doctor, doctor_tokens, formatting, readers, tokens
from mmspec.modalities.speech.codecs import Codec
from mmspec.modalities.speech.formatting import SpeakingFormatter
from mmspec.modalities.speech.synthesis import CODEC, SpeechSettings
from mmspec.modalities.speech.synthesis.layout import SpeechCodes
from mmspec.modalities.speech.synthesis.plug import load, tokenizer
from mmspec.modality import Finding
from mmspec.recipe import Recipe
from mmspec.targets.readers.reader import Reader


class SpeechFormatter(SpeakingFormatter):
    """Asks one model to speak."""

    def __init__(self, source: str, model: Any, settings: SpeechSettings, **options: Any) -> None:
        said = {name: one for name, one in asdict(settings).items() if name != "rounds"}
        said["repetition_aware"] = settings.repetition_aware or None
        super().__init__(source, settings.rounds, said)
        self.processor = tokenizer(formatting.origin(source, model))


formatter = SpeechFormatter


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """A smaller language model that speaks, or a head, for a model."""
    return formatting.load_drafter(model, source, load, **options)


def examine(target: str, drafter: str | None) -> list[Finding]:
    """What can be said of a model and its codec, or of a pair, without reading weights."""

    def bind(model: Any, recipe: Recipe, small: Any, parts: Mapping[str, Any]) -> Any:
        return tokens.bind(_reader(model), recipe, small, parts)

    found = doctor_tokens.examine(target, drafter, bind, _reader)
    return found if doctor.is_refused(found) else [*found, *_codec(target)]


def _reader(model: Any) -> Reader:
    return readers.reader(model, {})


def _codec(target: str) -> Iterator[Finding]:
    """Whether the codec beside a model has the codes that the model speaks."""
    folder = Path(target) / CODEC
    if not (folder / "config.json").is_file():
        remark = "there is no codec beside the weights; give codec= to accelerate()"
        yield Finding("codec", None, None, "note", remark)
        return
    try:
        with reading(str(folder), "codec"):
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            codec = Codec.of(doctor.skeleton(lambda: AutoModel.from_config(config)))
        layout = SpeechCodes.of(doctor_tokens.skeleton(target), None)
        layout.fit(codec)
    except ValueError as error:
        yield Finding("codec", None, None, "refused", str(error))
        return
    yield Finding("codec", type(codec.model).__name__)
    yield Finding("codes of speech, of the codec", layout.count, codec.size)
    yield Finding("voices", ", ".join(layout.voices) or "one, without a name")
