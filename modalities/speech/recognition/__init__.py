"""Models that hear and write: Whisper and its kin, speech in front of a language model."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from mmspec.modality import PICTURE_FILES, Entry, Modality, Source, setting

HEARD = ("input_features", "input_values")  # how a forward calls sounds
SEEN = ("pixel_values",)


def owns(source: Source) -> bool:
    """What generates tokens out of sounds alone, by its class: models that see as well are vlm's.

    What transformers lists as speaking is left to synthesis.
    """
    if source.model_type is None:
        return False
    import transformers
    from transformers.models.auto import modeling_auto

    speaks = {*modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES.values()}
    found = (getattr(transformers, name, None) for name in source.classes)
    kind = next((one for one in found if one is not None), None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        return False
    if not issubclass(kind, transformers.GenerationMixin):
        return False
    names = inspect.signature(kind.forward).parameters
    hears, sees = (any(one.startswith(kinds) for one in names) for kinds in (HEARD, SEEN))
    return hears and not sees and kind.__name__ not in speaks


@dataclass(frozen=True)
class RecognitionSettings:
    """What is heard, in which language, and how freely words are chosen."""

    audio: str | None = setting(None, "A sound file, WAV or what soundfile reads.")
    language: str | None = setting(None, "Of the speech, such as en; detected if not said.")
    task: str | None = setting(
        None, "What Whisper does with it.", choices=("transcribe", "translate")
    )
    timestamps: bool = setting(False, "Say when every piece was spoken.")
    max_new_tokens: int | None = setting(None, "Tokens to write at most, per 30 seconds.", min=1)
    temperature: float = setting(0.0, "0 is greedy.", min=0)


MODALITY = Modality(
    name="asr",
    decodes="tokens",
    recipe="prompt-lookup",
    recipe_with_drafter="whisper-assisted",
    settings=RecognitionSettings,
    package=__name__,
    owns=owns,
    zoo=Entry.read_entries(__name__),
    files=PICTURE_FILES,
    parts=("compressor", "kv", "tree", "length", "sees", "check", "processor"),
)
