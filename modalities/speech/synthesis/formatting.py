"""Requests from prompts, and WAV and spectrogram files from speech; findings of `doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel

from mmspec.errors import explain_load_errors
from mmspec.modalities.common import doctor, doctor_tokens, families, formatting, tokens
from mmspec.modalities.speech import CODEC, SpeechSettings
from mmspec.modalities.speech.codecs import Codec
from mmspec.modalities.speech.formatting import SpeechOutputFormatter
from mmspec.modalities.speech.synthesis.layout import SpeechCodes
from mmspec.modalities.speech.synthesis.plug import load, tokenizer
from mmspec.modality import Finding
from mmspec.recipe import Recipe
from mmspec.targets.readers.reader import Reader


class SpeechFormatter(SpeechOutputFormatter):
    """Requests to synthesize codes of one codebook."""

    def __init__(self, source: str, model: Any, settings: SpeechSettings, **options: Any) -> None:
        sampling = {name: one for name, one in asdict(settings).items() if name != "rounds"}
        sampling["repetition_aware"] = settings.repetition_aware or None
        super().__init__(source, settings.rounds, sampling)
        self.processor = tokenizer(formatting.get_source(source, model))


formatter = SpeechFormatter


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """Load a smaller codec language model, or a head, for a model."""
    return formatting.load_drafter(model, source, load, _reader, **options)


def examine(target: str, drafter: str | None) -> list[Finding]:
    """Findings about a model and its codec, or a pair, without reading weights."""

    def bind(model: Any, recipe: Recipe, small: Any, parts: Mapping[str, Any]) -> Any:
        return tokens.bind(_reader(model), recipe, small, parts)

    found = doctor_tokens.examine(target, drafter, bind, _reader)
    return found if doctor.is_refused(found) else [*found, *_codec(target)]


def _reader(model: Any) -> Reader:
    return families.make_reader(model, {})


def _codec(target: str) -> Iterator[Finding]:
    """Whether the codec in the model's folder has the codes that the model predicts."""
    folder = Path(target) / CODEC
    if not (folder / "config.json").is_file():
        remark = "there is no codec in the folder; give codec= to accelerate()"
        yield Finding("codec", None, None, "note", remark)
        return
    try:
        with explain_load_errors(str(folder), "codec"):
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            codec = Codec.of(doctor.skeleton(lambda: AutoModel.from_config(config)))
        layout = SpeechCodes.of(doctor_tokens.skeleton(target), None)
        layout.check_codec(codec)
    except ValueError as error:
        yield Finding("codec", None, None, "refused", str(error))
        return
    yield Finding("codec", type(codec.model).__name__)
    yield Finding("codes of speech, of the codec", layout.count, codec.size)
    yield Finding("voices", ", ".join(layout.voices) or "one, unnamed")
